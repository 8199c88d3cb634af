"""How an error's id is made: by Headrace for its own errors, by the reference for those of any package."""

from __future__ import annotations


def page_id(package: str, error_class: str, template: str, *, scheme: str = "1") -> str:
    """16 hex digits of a content hash; `template` is canonical: white space collapsed, `{}` for each placeholder."""
    import hashlib  # late: it loads a library that little else here needs

    content = "|".join((scheme, package, error_class, template))
    return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).hexdigest()
