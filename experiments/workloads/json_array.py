"""A large JSON array, entry by entry: memory for one chunk, and a file that was cut off still gives its whole entries."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 20  # bytes read at a time
MAX_ENTRY = 64 << 20  # characters; more than this without one whole entry is not a cut tail but broken JSON


def entries(file: Path, dropped: Counter[str]) -> Iterator[Any]:
    """The whole entries of a JSON array, read in chunks; a cut last one is counted in `dropped`.

    Raises ValueError when the file is no array, or an entry is not JSON.
    """
    decoder, text, pos = json.JSONDecoder(), "", 0
    with open(file, "rb") as raw:
        utf8 = codecs.getincrementaldecoder("utf-8")()  # a cut file may end within a character

        def more() -> bool:
            nonlocal text, pos
            data = raw.read(CHUNK)
            text, pos = text[pos:] + utf8.decode(data), 0
            return bool(data)

        more()
        if not text.lstrip().startswith("["):
            raise ValueError(f"{file.name} does not begin with a JSON array")
        pos = text.index("[") + 1
        num = 0
        while True:
            while pos < len(text) and text[pos] in ", \t\r\n":
                pos += 1
            if pos < len(text) and text[pos] == "]":
                return
            try:
                entry, pos = decoder.raw_decode(text, pos)
            except json.JSONDecodeError as error:
                if len(text) - pos > MAX_ENTRY:
                    raise ValueError(f"{file.name}: entry {num} is not JSON: {error.msg}") from error
                if not more():
                    dropped["entries_cut_off"] += bool(text)
                    return
                continue
            num += 1
            yield entry
