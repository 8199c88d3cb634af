"""`headrace reference lint`, and its findings as SARIF. Knows the rules, not the command line."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from headrace import __version__
from headrace.cli.reference_work import progress_bar, sources
from headrace.errors import InvalidSetting, OutputFailed
from headrace.reference import lint, sarif
from headrace.reference.packages import PackageSource


def lint_package(
    package: str, source: Path | None, wheels: Sequence[Path], *, as_json: bool, sarif_file: Path | None
) -> int:
    """Print what is wrong with the messages of a package; 1 if anything is.

    Raises: PackageNotFound, SourceUnusable, OutputFailed.
    """
    one = sources(package, source, wheels)[-1]
    findings = _findings(one)
    if sarif_file is not None:
        _write_json(sarif_file, sarif.document(findings, one, __version__))
    if as_json:
        typer.echo(json.dumps(_plain(findings, one), indent=2, ensure_ascii=False))
    else:
        _print(findings, one)
    return 1 if findings else 0


def export_sarif(package: str | None, source: Path | None, wheels: Sequence[Path], file: Path) -> None:
    """Write the findings as SARIF; to have some is no failure here. Raises: InvalidSetting, OutputFailed ..."""
    if package is None:
        raise InvalidSetting(
            setting="PACKAGE",
            value="missing",
            allowed="given with --sarif",
            suggestion="vllm, or the name of another package",
        )
    one = sources(package, source, wheels)[-1]
    findings = _findings(one)
    _write_json(file, sarif.document(findings, one, __version__))
    typer.echo(f"{len(findings)} findings in {file}")


def _findings(source: PackageSource) -> list[lint.Finding]:
    with progress_bar() as show:
        return lint.lint(source, show)


def _plain(findings: Sequence[lint.Finding], source: PackageSource) -> dict[str, Any]:
    return {
        "package": {"name": source.name, "version": source.version, "commit": source.commit},
        "files": len(source.files),
        "findings": [
            {
                "rule": finding.rule,
                "level": finding.level,
                "file": finding.file,
                "line": finding.line,
                "qualname": finding.qualname,
                "says": lint.rule(finding.rule).says,
                "here": finding.what,
                "mend": lint.rule(finding.rule).mend,
                "permalink": source.permalink(finding.file, finding.line),
            }
            for finding in findings
        ],
    }


def _print(findings: Sequence[lint.Finding], source: PackageSource) -> None:
    for finding in findings:
        typer.echo(f"{finding.file}:{finding.line}: {finding.rule}: {finding.what}")
    counts = Counter(finding.rule for finding in findings)
    told = [f"{counts[rule.name]} {rule.name}: {rule.says} {rule.mend}" for rule in lint.RULES if counts[rule.name]]
    whole = f"{source.name} {source.version}: {len(findings)} findings in {len(source.files)} files."
    typer.echo("\n".join(["", *told, whole] if told else [whole]))


def _write_json(file: Path, document: dict[str, Any]) -> None:
    """Write a file whole, or leave what was there. Raises: OutputFailed."""
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    partial = None
    try:
        handle, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-", suffix=".partial")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, file)
        partial = None
    except OSError as error:
        raise OutputFailed(output=f"the findings to {str(file)!r}", reason=error.strerror or str(error)) from error
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
