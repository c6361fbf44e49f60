#!/usr/bin/env python3
"""Takes the English prose and the source code out of Debian packages, as one text file for each document.

Usage: corpus_text.py OUT PROSE_MB DEB...       needs the package lxml At most PROSE_MB million characters of a
package's prose are taken, and CODE_MB of its code; a hash of their names selects the files. FILE.deb=MB sets both
limits of a package to MB. The documents are written as OUT/PACKAGE/NNNNN.txt. OUT.packages.txt lists package, version,
documents, bytes. Left out: files that are not UTF-8, short or very long files, tables and other text of few letters,
prose that is not English, navigation of HTML pages, text that the package has as HTML too, and files and paragraphs of
prose that the package has twice.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
from typing import Iterator

import lxml.etree
import lxml.html

CODE_MB = 4
HTML_SHARE = 6  # bytes of HTML that are read for each byte of text that is wanted
LEAST, MOST = 600, 1_000_000  # characters of a document; longer ones are cut at a blank line
HTML = re.compile(r"\.x?html?(\.gz)?$")
PROSE = re.compile(r"(\.(txt|rst|md|pod|adoc|dict|texi|texinfo|info(-\d+)?)(\.gz)?|\.dict\.dz)$|/fortunes/[a-z-]+$")
CODE = re.compile(r"\.(c|h|py|rs|go|el|pm|pl|rb|cmake|vim|lisp)(\.gz)?$")
LEFT_OUT = re.compile(
    r"(?i)changelog|copyright|license|linux-source[^/]*/documentation/|/_sources/|/_modules/|genindex|py-modindex|search\.html|/src/.*\.html"
    r"|_8(h|c|cc|hpp|cpp)[_-]|_source\.html|-members\.html|/(functions|globals|classes|hierarchy|namespaces?)_?\w*\.html"
    r"|/(unicode|tables?|gen|testdata|vendor|asm-offsets|drivers/gpu)/|_generated|\.min\.|/print\.html"
    r"|/(ar|bg|bn|ca|cs|da|de|el|es|eu|fa|fi|fr|gl|hu|id|it|ja|ko|lt|lv|nb|nl|nn|pa|pl|pt|ro|ru|sk|sl|sr|sv|te|th|tr|uk|vi|zh)"
    r"([-_][A-Za-z]+)?/"
)
WORD = re.compile(r"[A-Za-z]+")
COMMON = frozenset("the of to and is in a for that be this with as are or an by it on".split())
BLOCKS = frozenset("p div li ul ol dl dt dd pre table tr h1 h2 h3 h4 h5 h6 section blockquote article br hr".split())
SKIPPED = frozenset("script style nav header footer head form button svg noscript select".split())
CHROME = re.compile(
    r"(?i)sphinxsidebar|related|navheader|navfooter|headerlink|breadcrumb|sidebar|toctree|footer|navigation|linenos"
)


# ---- HTML ----


def pieces(element, verbatim: bool) -> Iterator[str]:
    tag = element.tag
    if (
        not isinstance(tag, str)
        or tag in SKIPPED
        or CHROME.search(f"{element.get('class', '')} {element.get('id', '')}")
    ):
        return
    verbatim = verbatim or tag == "pre"
    block = "\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4", "table") else "\n" if tag in BLOCKS else ""
    yield block
    if element.text:
        yield element.text if verbatim else re.sub(r"\s+", " ", element.text)
    for child in element:
        yield from pieces(child, verbatim)
        if child.tail:
            yield child.tail if verbatim else re.sub(r"\s+", " ", child.tail)
    yield block if block else "  " if tag in ("td", "th") else ""


def html_text(data: bytes) -> str:
    try:
        page = lxml.html.document_fromstring(data, parser=lxml.html.HTMLParser(encoding="utf-8"))
        text = "".join(pieces(page, False))
    except (lxml.etree.LxmlError, ValueError, RecursionError):
        return ""
    text = re.sub(r"[ \t\xa0]+\n", "\n", text.replace("¶", ""))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\n (?=\S)", "\n", text)).strip() + "\n"


# ---- which text ----


def is_wanted(text: str, code: bool) -> bool:
    if len(text) < LEAST:
        return False
    letters = sum(map(text.count, "etaoinsrhldcumfpgwybvk "))
    if letters < (0.45 if code else 0.6) * len(text) or max(map(len, text.split("\n"))) > 20_000:
        return False
    words = [word.lower() for word in WORD.findall(text[:200_000])]
    return code or sum(word in COMMON for word in words) >= 0.12 * len(words) > 0


def read(data: bytes, name: str) -> str:
    try:
        if name.endswith((".gz", ".dz")):
            data = gzip.decompress(data)
        text = data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return ""
    return "" if "\0" in text else html_text(data) if HTML.search(name) else text.replace("\r", "")


def parts(text: str) -> Iterator[str]:
    while len(text) > MOST:
        cut = text.find("\n\n", MOST // 2)
        if not 0 < cut < MOST:
            return
        yield text[:cut]
        text = text[cut:].lstrip("\n")
    yield text


def open_package(path: str) -> tuple[subprocess.Popen, tarfile.TarFile]:
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return process, tarfile.open(fileobj=process.stdout, mode="r|")


def members(path: str) -> Iterator[tuple[str, int, object]]:
    """Name, size and a function that reads it, for every file, also for those of an archive inside the package."""
    process, archive = open_package(path)
    with process, archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".tar.xz"):
                with tarfile.open(fileobj=archive.extractfile(member), mode="r|xz") as inner:
                    for file in inner:
                        if file.isfile():
                            yield file.name, file.size, lambda file=file: inner.extractfile(file).read()
            elif member.isfile():
                yield member.name, member.size, lambda: archive.extractfile(member).read()


def stem(name: str) -> str:
    return os.path.basename(name).split(".")[0]


def documents(job: tuple[str, float, float]) -> tuple[str, list[tuple[bool, str]]]:
    """The wanted documents of one package: (whether it is code, text)."""
    path, prose, code = job
    left = {True: code * 1e6, False: prose * 1e6 * HTML_SHARE}
    listed = [(name, size) for name, size, _ in members(path) if size < 60e6 and not LEFT_OUT.search("/" + name)]
    pages = {stem(name) for name, _ in listed if HTML.search(name)}
    listed = [
        (name, size) for name, size in listed if HTML.search(name) or not (PROSE.search(name) and stem(name) in pages)
    ]
    chosen: dict[str, bool] = {}
    for name, size in sorted(listed, key=lambda file: hashlib.sha1(file[0].encode()).digest()):
        is_code = bool(CODE.search(name))
        if (is_code or HTML.search(name) or PROSE.search(name)) and left[is_code] > 0:
            chosen[name] = is_code
            left[is_code] -= (
                size * (4 if name.endswith(("gz", "dz")) else 1) * (1 if is_code or HTML.search(name) else HTML_SHARE)
            )
    texts = {name: read(get(), name) for name, _, get in members(path) if name in chosen}
    found = [
        (chosen[name], part)
        for name, text in sorted(texts.items())
        for part in parts(text)
        if is_wanted(part, chosen[name])
    ]
    left = {True: code * 1e6, False: prose * 1e6}
    taken = []
    for is_code, text in sorted(found, key=lambda document: hashlib.sha1(document[1].encode()).digest()):
        if left[is_code] > 0:
            taken.append((is_code, text))
            left[is_code] -= len(text)
    return path, taken


# ---- once only ----


def without_repeats(text: str, seen: set[bytes]) -> str:
    kept = []
    for paragraph in text.split("\n\n"):
        key = hashlib.md5(paragraph.strip().encode()).digest()[:8]
        if len(paragraph) < 40 or key not in seen:
            kept.append(paragraph)
            seen.add(key)
    return "\n\n".join(kept)


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    out, prose = sys.argv[1], float(sys.argv[2])
    jobs = []
    for argument in sys.argv[3:]:
        path, _, limit = argument.partition("=")
        jobs.append((path, float(limit or prose), float(limit or CODE_MB)))
    lines = []
    with multiprocessing.Pool() as pool:
        for path, found in pool.imap(documents, jobs):
            seen: set[bytes] = set()
            package, version = os.path.basename(path).split("_")[:2]
            os.makedirs(os.path.join(out, package), exist_ok=True)
            count = size = 0
            for code, text in found:
                whole = hashlib.md5(text.encode()).digest()
                text = "" if whole in seen else text if code else without_repeats(text, seen)
                seen.add(whole)
                if len(text) < LEAST:
                    continue
                with io.open(os.path.join(out, package, f"{count:05}.txt"), "w", encoding="utf-8") as file:
                    size += len(text.encode())
                    file.write(text)
                count += 1
            lines.append(f"{package} {version.replace('%3a', ':')} {count} {size}")
            print(lines[-1], flush=True)
    with open(f"{out}.packages.txt", "w", encoding="ascii") as file:
        file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
