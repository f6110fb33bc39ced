"""Which regions of a graph shall not run as one node, and why.

A loop, a section, modules up to their losses could; what parts count, whom they live with and what
is asked of single operators may stand against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from geartrain.engine.parts import original_name
from geartrain.graph.region import Region
from geartrain.parts.trained import AbstractPart


@final
@dataclass(frozen=True, slots=True)
class WhatRunsTogether:
    """What an engine is made with, as far as it matters here.

    Args:
        operators: Their names, by number.
        names: Node name to part name, for nodes with parameters.
        parts: By name.
        span: Workers that a copy of the graph lives on.
        placement: Part or node name to worker.
        reach: As of ``Settings``.
        measured: Whether somebody asks what each node computes.
    """

    operators: Mapping[int, str]
    names: Mapping[str, str]
    parts: Mapping[str, AbstractPart]
    span: int
    placement: Mapping[str, int]
    reach: bool
    measured: bool = False

    def why_by_steps(self, region: Region) -> str | None:
        """Why a loop that could run whole shall not; None: it shall."""
        names, placement = self.names, self.placement
        inside = {self.operators[number] for number in region.operators}
        placed = {original_name(name) for name in placement} & inside - set(names.values())
        if placed:
            return f"'{min(placed)}' of it is placed by its name"
        parts = {names[name] for name in inside if name in names}
        mine = self._parts_of(region)
        if region.made_of and not self._may_reach(mine):
            return "what is beside it is to be by itself"
        if any(part.trigger.unit == "messages" for part in mine):
            return "its parts count messages"
        if not region.said:  # updates would end, and windows open, with whole instances
            how = f"; graph.loop(name='{region.name}', run='auto') has it run whole"
            how *= region.loops
            if any(part.trigger.unit == "rows" for part in mine):
                return f"its parts count rows{how}"
            if any(part.rules.window is not None for part in mine):
                return f"a part of it has a window{how}"
        if self.span > 1 and len(parts) > 1:
            homes = {placement.get(name) for name in parts}
            if region.run != "whole" or len(homes - {None}) > 1:
                return "its parts may live on several workers"
        return None

    def why_apiece(self, region: Region) -> str | None:
        """Why modules that one node could compute up to their losses shall have one each.

        Their updates are to be of the same instances, and nobody is to look at how old gradients
        are: they are of the weights that the rows saw.
        """
        if self.measured:
            return "what each computes is asked for"
        mine = self._parts_of(region)
        if not self._may_reach(mine) or len({part.trigger for part in mine}) > 1:
            return "they do not step together"
        rules = [part.rules for part in mine]
        if any(r.max_staleness is not None or r.delay is not None or r.view for r in rules):
            return "the age of gradients is looked at"
        return self.why_by_steps(region)

    def _parts_of(self, region: Region) -> list[AbstractPart]:
        names = {self.names.get(self.operators[number]) for number in region.operators}
        return [part for name, part in self.parts.items() if name in names]

    def _may_reach(self, parts: Sequence[AbstractPart]) -> bool:
        """Whether loops may run together with what is beside them, and with these parts."""
        counts = all(part.trigger.unit in ("instances", None) for part in parts)
        return self.reach and counts and all(part.wants_graph is None for part in parts)
