"""Collects source files for training and records their origin and licence.

In a site-packages folder (with `*.dist-info`) only distributions under a permissive licence are
used. For any other folder the caller is responsible for the licence.
"""

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

_PERMISSIVE = re.compile(
    r"\b(MIT|0?BSD|BSD-[0-3]-Clause|Apache|ISC|PSF|Python-2\.0|Python Software Foundation|HPND|CMU"
    r"|Historical Permission|Zlib|zlib/libpng|Unlicense|CC0)\b",
    re.IGNORECASE,
)
_RESTRICTIVE = re.compile(
    r"\b(A?L?GPL|GNU|MPL|Mozilla|EUPL|Proprietary|NVIDIA|Commercial|CC-BY)", re.I
)
_SKIPPED_FOLDERS = frozenset(
    [
        "__pycache__",
        "_vendor",
        "vendor",
        "_vendored",
        "vendored",
        "third_party",
        "extern",
        "externals",
        "node_modules",
        "testdata",
        "test_data",
        "fixtures",
        "site-packages",
        "dist-packages",
        ".git",
        ".venv",
    ]
)
_GENERATED = re.compile(
    r"(do not (edit|modify)|(auto[- ]?|automatically )generated|generated (by|from|automatically))",
    re.IGNORECASE,
)
MAX_BYTES = 200_000
MIN_BYTES = 200


@dataclass(frozen=True)
class Document:
    """One source file; `digest` is the SHA-256 of its text."""

    source: str
    text: str
    digest: str

    @property
    def held_out(self) -> bool:
        """One file in a hundred, by content, so that a rerun splits alike."""
        return int(self.digest[:8], 16) % 100 == 0


def licence_of(metadata: str) -> tuple[str, bool]:
    """(licence named by a METADATA file, whether it is permissive)."""
    headers = HeaderParser().parsestr(metadata)
    expression = headers.get("License-Expression")
    if expression:
        parts = re.split(r"\bAND\b", expression)
        return expression, all(_PERMISSIVE.search(p) for p in parts)
    classifiers = [
        c.split("::")[-1].strip()
        for c in headers.get_all("Classifier", [])
        if c.startswith("License ::")
    ]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    stated = "; ".join(classifiers) or (headers.get("License") or "unknown").strip().split("\n")[0]
    return stated, bool(_PERMISSIVE.search(stated)) and not _RESTRICTIVE.search(stated)


def _installed(folder: Path) -> Iterator[tuple[str, str, bool, list[Path]]]:
    """(name, licence, kept, python files) of each distribution in a site-packages."""
    for info in sorted(folder.glob("*.dist-info")):
        metadata, record = info / "METADATA", info / "RECORD"
        if not metadata.exists() or not record.exists():
            continue
        licence, kept = licence_of(metadata.read_text(encoding="utf-8", errors="replace"))
        with record.open(newline="", encoding="utf-8") as file:
            names = [row[0] for row in csv.reader(file) if row and row[0].endswith(".py")]
        files = [folder / n for n in names if not n.startswith(("..", "/"))]
        yield info.name.removesuffix(".dist-info"), licence, kept, files


def _in_skipped_folder(path: Path, root: Path) -> bool:
    return any(part in _SKIPPED_FOLDERS for part in path.relative_to(root).parts[:-1])


def rejects(text: str) -> str | None:
    """Why a file is excluded from training; None if it is included."""
    if not MIN_BYTES <= len(text) <= MAX_BYTES:
        return "size"
    if sum(c > "\x7f" for c in text[:20_000]) > 0.1 * min(len(text), 20_000):
        return "not ASCII"
    if _GENERATED.search(text[:1000]):
        return "generated"
    lines = text.count("\n") + 1
    if len(text) / lines > 100 or max(map(len, text.split("\n"))) > 1000:
        return "long lines"
    return None


def _read(job: tuple[str, Path]) -> tuple[str, str | None]:
    source, path = job
    try:
        if path.stat().st_size > 4 * MAX_BYTES:
            return source, None
        return source, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return source, None


def collect(folders: list[Path]) -> tuple[list[Document], dict]:
    """Reads, filters and removes duplicates.

    Returns:
      documents in a fixed order, and a report: packages kept and dropped with licence and
      bytes, and how many files each rule rejected.
    """
    jobs, packages, rejected = [], {}, Counter()
    for folder in folders:
        if any(folder.glob("*.dist-info")):
            distributions = _installed(folder)
        else:
            files = sorted(folder.rglob("*.py"))
            distributions = [(folder.name, "as stated by the caller", True, files)]
        for name, licence, kept, files in distributions:
            files = [f for f in files if not _in_skipped_folder(f, folder)]
            packages[name] = dict(licence=licence[:100], kept=kept, files=0, bytes=0)
            if kept:
                jobs += [(name, file) for file in files]
    documents, seen = [], set()
    with ThreadPoolExecutor(16) as pool:
        for source, text in pool.map(_read, jobs, chunksize=64):
            reason = "unreadable" if text is None else rejects(text)
            digest = hashlib.sha256((text or "").encode()).hexdigest()
            if reason is None and digest in seen:
                reason = "duplicate"
            if reason is not None:
                rejected[reason] += 1
                continue
            seen.add(digest)
            documents.append(Document(source, text.replace("\r\n", "\n"), digest))
            packages[source]["files"] += 1
            packages[source]["bytes"] += len(text)
    return documents, dict(packages=packages, rejected=dict(rejected))
