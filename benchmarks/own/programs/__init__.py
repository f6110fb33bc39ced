"""Programs as new users write them; each in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.own.programs.attentive import Attentive
from benchmarks.own.programs.childsum import ChildSum
from benchmarks.own.programs.codes import Codes
from benchmarks.own.programs.copier import Copier
from benchmarks.own.programs.depths import Depths
from benchmarks.own.programs.edges import Edges
from benchmarks.own.programs.exits import Exits
from benchmarks.own.programs.grower import Grower
from benchmarks.own.programs.halting import Halting
from benchmarks.own.programs.hierarchy import Hierarchy
from benchmarks.own.programs.layouts import Layouts
from benchmarks.own.programs.mesh import Mesh
from benchmarks.own.programs.messages import Messages
from benchmarks.own.programs.moe import Moe
from benchmarks.own.programs.overseen import Overseen
from benchmarks.own.programs.parser import Parser
from benchmarks.own.programs.pointer import Pointer
from benchmarks.own.programs.ponder import Ponder
from benchmarks.own.programs.program import AbstractProgram
from benchmarks.own.programs.reader import Reader
from benchmarks.own.programs.seq2seq import SequenceToSequence
from benchmarks.own.programs.skip import Skip
from benchmarks.own.programs.tagger import Tagger
from benchmarks.own.programs.typed import Typed

PROGRAMS: Final[Mapping[str, type[AbstractProgram]]] = {
    program.name: program
    for program in (
        ChildSum,
        Typed,
        Halting,
        SequenceToSequence,
        Messages,
        Skip,
        Exits,
        Hierarchy,
        Pointer,
        Moe,
        Tagger,
        Grower,
        Edges,
        Layouts,
        Parser,
        Attentive,
        Depths,
        Reader,
        Overseen,
        Mesh,
        Codes,
        Copier,
        Ponder,
    )
}
"""All of them by name."""
