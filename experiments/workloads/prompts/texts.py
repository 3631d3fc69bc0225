"""Written prompts: templates of twelve kinds, each filled with topics of fourteen fields.

What a prompt says depends on its template and its topic alone, and which topics a template meets on no other template: one that
is added later changes no prompt that is there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

HELD_OUT = 0.45  # of the templates of each kind and the topics of each field
NUM_TOPICS = 20  # topics that each template is filled with, of all that there are
NUMBER = re.compile(r"\{(\d+)\.\.(\d+)\}")  # {2..19}: a whole number of that range
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the pure one takes a second


class Prompt(NamedTuple):
    """template: kind/name. topic: field/name. kind: what is asked for (chat, code, summary, ...)."""

    text: str
    template: str
    topic: str
    kind: str


def written(seed: int = 0) -> list[Prompt]:
    """All prompts, shuffled: the first few are of every kind. seed: which topics each template meets, and the order."""

    def drawn(template: str, topic: str) -> int:
        return _digest(str(seed), template, topic)

    pairs = [
        (template, topic) for template in templates() for topic in sorted(topics(), key=partial(drawn, template))[:NUM_TOPICS]
    ]
    pairs.sort(key=lambda pair: drawn(*pair))
    return [Prompt(filled(template, topic), template, topic, template.split("/")[0]) for template, topic in pairs]


def held_out(names: Iterable[str]) -> frozenset[str]:
    """Of templates (kind/name) or topics (field/name) those that are held out: of each kind or field HELD_OUT, by their names'
    digests, so that one that is added later moves one at most."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.split("/")[0], []).append(name)
    found = (sorted(own, key=partial(_digest, "held out"))[: round(HELD_OUT * len(own))] for own in kinds.values())
    return frozenset(name for own in found for name in own)


def filled(template: str, topic: str) -> str:
    """The text of a template about a topic: forms of the topic in the place of {name}, {Name} (with a capital letter), ...,
    numbers in the place of ranges. Raises KeyError where there is no such template, topic or form."""
    forms = topics()[topic]
    capitals = {key.capitalize(): form[:1].upper() + form[1:] for key, form in forms.items()}

    def number(found: re.Match[str]) -> str:
        low, high = int(found[1]), int(found[2])
        return str(low + _digest(template, topic, str(found.start())) % (high - low + 1))

    return NUMBER.sub(number, templates()[template]).format_map(forms | capitals)


def templates() -> dict[str, str]:
    """kind/name -> text with places to fill, of every template. The first 60 characters of what it makes must not be those of
    another prompt: such prompts count as near duplicates (`lengthwise.predictors.near_duplicates`)."""
    return _read("templates")


def topics() -> dict[str, dict[str, str]]:
    """field/name -> forms of every topic. name: what stands after "about"; rival: what it is compared with; who: a person, with
    article; items: things to count; columns: of a table; why: a question; line: an opinion; text: a passage; es, fr, de (in the
    accusative), pt, it, zh, ja: its name in that language, with article."""
    return _read("topics")


@cache
def _read(folder: str) -> dict[str, Any]:
    files = sorted(Path(__file__).with_name(folder).glob("*.yaml"))
    parts = {file.stem: yaml.load(file.read_bytes(), Loader=LOADER) for file in files}
    return {f"{stem}/{name}": value for stem, part in parts.items() for name, value in part.items()}


def _digest(*words: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest(), "big")
