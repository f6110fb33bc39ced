"""What a runtime gives to keep its workers apart: floors below it know no threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias, final


class AbstractLock(Protocol):
    """``threading.Lock`` or ``NoLock``."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...


MakeLock: TypeAlias = Callable[[], AbstractLock]


@final
class NoLock:
    """For a runtime of one thread."""

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        pass


@final
class NothingInCommon:
    """In place of a lock between copies in several processes: what it would guard is not shared.

    Args:
        who: Keeps something there.
    """

    def __init__(self, who: str) -> None:
        self._who = who

    def acquire(self, blocking: bool = True) -> NoReturn:
        raise ValueError(
            f"{self._who} keeps something of all copies under self.lock, and worker processes have "
            "no memory in common: keep it by copy in me.tensors and me.numbers and reach others by "
            "letters, or use runtime=gt.Threads(...)"
        )

    def release(self) -> None:
        pass

    def __enter__(self) -> NoReturn:
        self.acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        pass
