"""Whether a module can be a part's: what speaks against it is told when the session is made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from geartrain.errors import GraphError
from geartrain.nodes.kernel import parameters_of


def require_made(name: str, module: nn.Module) -> None:
    """All weights of a part are there.

    Args:
        name: Of the part.
        module: Its weights are looked at, before they are moved to a device.

    Raises:
        GraphError: Some are made by a first call that has not been, have no numbers, or have a hook
            that nobody calls.
    """
    for path, x in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(x):
            raise GraphError(
                f"part '{name}': '{path}' of {type(module).__name__} is made by the first call, "
                "and an optimiser wants it before: call the module on rows of its shape, as in "
                "module(torch.zeros(1, 2)), before the session is made, or name the sizes"
            )
        if x.is_meta:
            raise GraphError(
                f"part '{name}': '{path}' lies on the device meta and has no numbers: make them by "
                "module.to_empty(device='cpu') and initialise them before the session is made"
            )
        if x.is_inference():
            raise GraphError(
                f"part '{name}': '{path}' was made under torch.inference_mode(), which forbids "
                "writing to it: make the module outside of it, or copy it there"
            )
        if getattr(x, "_post_accumulate_grad_hooks", None):
            raise GraphError(
                f"part '{name}': '{path}' has a hook for its .grad, which no one would call, as a "
                "part adds gradients up by itself: use register_hook(...), Rules(clip=...), or an "
                "optimiser that does so in its step"
            )


def require_same(name: str, module: nn.Module, known: Sequence[nn.Parameter]) -> None:
    """A part's module has the parameters that its optimiser has.

    Args:
        name: Of the part.
        module: As it is now.
        known: Its parameters when the part was made.

    Raises:
        GraphError: It has others, or more, or fewer.
    """
    now = parameters_of(module)
    if len(now) == len(known) and all(a is b for a, b in zip(now, known, strict=True)):
        return
    old = {id(p) for p in known}
    others = [path for path, p in module.named_parameters() if id(p) not in old]
    came = f"{', '.join(repr(path) for path in others[:5])} came" if others else "some have gone"
    raise GraphError(
        f"part '{name}': the parameters of {type(module).__name__} are not those that it had when "
        f"the session was made: {came}. Write into those that it had (load_state_dict(...) without "
        "assign=True, or copy_() under torch.no_grad()), or make a new Session"
    )


def require_one_device(name: str, module: nn.Module) -> None:
    """Raises:
    ValueError: Parameters of a part lie on several devices.
    """
    found = sorted({str(p.device) for p in module.parameters()})
    if len(found) > 1:
        raise ValueError(
            f"part '{name}': its parameters lie on {', '.join(found)}, and a part lives on one "
            "device; move its module there, or say where: Part(module, device=...)"
        )
