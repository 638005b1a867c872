"""Names of places: nodes, and the failure domains that they are in.

A failure domain is text, the widest level first: `switch-2/rack-7/node-13`. One word is one level.
"""

from __future__ import annotations

from collections.abc import Mapping

SEPARATOR = "/"
_UNIQUE = "+"


def place(node: str) -> str:
    """The machine that a node's agent runs on: the agent's name without what tells it from those before it on
    that machine (`settings.unique`)."""
    return node.partition(_UNIQUE)[0]


def domain_of(node: str, domains: Mapping[str, str]) -> str:
    """The failure domain of `node`: its label, or the node itself where it has none."""
    return domains.get(node) or node


def within(domain: str) -> tuple[str, ...]:
    """The domains that this one is in, the widest first, itself last: `a`, `a/b`, `a/b/c`."""
    parts = domain.split(SEPARATOR)
    return tuple(SEPARATOR.join(parts[: level + 1]) for level in range(len(parts)))


def shared(domain: str) -> str:
    """The narrowest domain that a node may share with others: its rack, where there are several levels; else
    the domain itself."""
    return domain.rpartition(SEPARATOR)[0] or domain
