"""Findings of the message lint as SARIF 2.1.0 (OASIS standard), which code hosts and editors show beside the source.

Knows no rules beyond what a finding says of itself.
"""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Sequence
from typing import Any

from headrace.reference.lint import RULES, Finding, Rule
from headrace.reference.packages import PackageSource

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SRCROOT"


def document(findings: Sequence[Finding], source: PackageSource, tool_version: str) -> dict[str, Any]:
    """One run over one package. Paths are relative to the root of its repository, as far as that is known."""
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "headrace reference lint",
                "semanticVersion": tool_version,
                "rules": [_rule(rule) for rule in RULES],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {
            _ROOT: {"description": {"text": f"The root of the source of {source.name} {source.version}."}}
        },
        "results": _results(findings, source.prefix),
    }
    if source.repository is not None:
        revision = {"revisionId": source.commit} if source.commit else {"revisionTag": f"v{source.version}"}
        run["versionControlProvenance"] = [
            {"repositoryUri": source.repository, "mappedTo": {"uriBaseId": _ROOT}, **revision}
        ]
    return {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.name,
        "shortDescription": {"text": rule.says},
        "help": {"text": rule.mend},
        "defaultConfiguration": {"level": rule.level},
    }


def _results(findings: Sequence[Finding], prefix: str) -> list[dict[str, Any]]:
    index = {rule.name: number for number, rule in enumerate(RULES)}
    counts: dict[str, int] = {}
    results = []
    for finding in findings:
        mark = _fingerprint(finding)
        counts[mark] = counts.get(mark, 0) + 1
        where: dict[str, Any] = {
            "physicalLocation": {
                "artifactLocation": {"uri": urllib.parse.quote(prefix + finding.file), "uriBaseId": _ROOT},
                "region": {"startLine": finding.line},
            }
        }
        if finding.qualname:
            where["logicalLocations"] = [{"fullyQualifiedName": finding.qualname}]
        results.append(
            {
                "ruleId": finding.rule,
                "ruleIndex": index[finding.rule],
                "level": finding.level,
                "message": {"text": f"{RULES[index[finding.rule]].says} Here {finding.what}."},
                "locations": [where],
                "partialFingerprints": {"fault/v1": f"{mark}:{counts[mark]}"},
            }
        )
    return results


def _fingerprint(finding: Finding) -> str:
    """The same for a finding whose line has moved."""
    content = "|".join((finding.file, finding.qualname, finding.rule, finding.what))
    return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).hexdigest()
