"""Where fault tolerance enters DeepSpeed: `deepspeed.initialize`, patched at run time, no file of it changed.

The hooks are in place before the user's script runs, and do nothing until a configuration with an
enabled `fault_tolerance` section comes along.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ft_core.import_hook import after_import
from ft_deepspeed import patched

if TYPE_CHECKING:
    from ft_core.worker.session import Session
    from ft_deepspeed.reference import References


def install() -> None:
    """Patch `deepspeed.initialize`, now or as soon as deepspeed is imported. May be called again."""
    after_import("deepspeed", _patch)


LATE = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # brings in torch's compiler: 3 of a newcomer's 4 seconds
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
)
"""What `deepspeed.initialize` imports when it is called. Not every version has all of them."""


def preload() -> None:
    """In a node's fork server, for a script that uses DeepSpeed: have its late imports done."""
    if "deepspeed" in sys.modules:
        for name in LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _patch(module: ModuleType) -> None:
    patched.INITIALIZE.wrap(_protected, of=module)
    patched.BUILD_SHM_OP.wrap(_not_under_ftrun)


def _not_under_ftrun(build: Callable[..., Any]) -> Callable[..., Any]:
    """On CPUs, DeepSpeed compiles an all-reduce over shared memory for inference when it starts.

    It goes by the process groups and cannot be repaired; and a worker killed while compiling leaves a lock
    behind that hangs whoever starts next. DeepSpeed uses the process group in its absence.
    """

    def build_unless_protected() -> Any:
        from ft_core.worker import session

        return None if session.current() is not None else build()

    return build_unless_protected


@contextlib.contextmanager
def _newcomers(current: Session) -> Iterator[None]:
    """What a newcomer does otherwise as an engine is made.

    Weights that the first rank sends are overwritten, or made alike by its start-up (see `reference`).
    """
    if not current.joining:
        yield
        return
    with _unannounced(current), current.in_place.weights():
        yield


@contextlib.contextmanager
def _unannounced(current: Session) -> Iterator[None]:
    """What a newcomer leaves out.

    A pipeline's stages send each other a zero when they are made, which does no more than connect them. A
    newcomer's peers have done so; or they come back with it, and are connected when they take part.
    """
    with contextlib.ExitStack() as undo:
        for patch in patched.CONNECT_STAGES:
            undo.enter_context(patch.replaced(lambda *args, **kwargs: None))
        yield


_AGAIN = (
    "its script has called deepspeed.initialize again after step {} of the engine that was protected, and "
    "one engine per process can be: what it trains now is as safe as its own checkpoints"
)


def _trains(given: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether the engine has an optimizer. One without is a reference, teacher or reward model; a pipeline
    without is an error that the user should see."""
    from deepspeed.runtime.pipe.module import PipelineModule

    named = (config.get("optimizer") or {}).get("type")
    return (
        given.get("optimizer") is not None
        or named is not None
        or isinstance(given.get("model"), PipelineModule)
    )


def _protected(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    references: References | None = None

    def initialize(*args: Any, **kwargs: Any) -> Any:
        from ft_core.errors import ConfigError
        from ft_core.worker import session
        from ft_deepspeed import config
        from ft_deepspeed.reference import References

        nonlocal references
        references = references or References()
        given = signature.bind_partial(*args, **kwargs).arguments
        found = given.get("config") or given.get("config_params")
        if found is None:
            arguments = given.get("args")
            found = getattr(arguments, "deepspeed_config", None) or getattr(
                arguments, "deepscale_config", None
            )
        current = session.current()
        if found is not None and not _trains(given, config.read(found)):
            if current is None:
                return original(*args, **kwargs)
            with _newcomers(current):
                engine, *others = original(*args, **kwargs)
            references.add(engine, current)
            return engine, *others
        if (first := references.protection) is not None:
            if first.retires(_AGAIN.format(first.position)):
                return original(*args, **kwargs)
            raise ConfigError(
                "deepspeed.initialize was called again: fault_tolerance protects one engine per process, and "
                "what a second one that has an optimizer does could not be done again after a failure, with "
                'or without a section of its own; set "enabled": false in the first, or do without the '
                "second; a model that is only evaluated (a reference, a teacher) needs no optimizer: leave "
                '"optimizer" out of its configuration'
            )
        section = config.parse(config.read(found)) if found is not None else None
        if section is None:
            if current is not None and not current.protecting:
                current.unprotected(config.absence(found))
            return original(*args, **kwargs)
        if current is None:
            raise ConfigError(
                "fault_tolerance.enabled needs ftrun in place of torchrun or deepspeed (torchrun's flags): "
                'nothing would protect this job; or set "enabled": false'
            )
        from ft_deepspeed.protection import Protection

        current.configure(section.settings())
        with _newcomers(current):
            engine, *others = original(*args, **kwargs)
        if section.in_place:
            given_here = "policy" in section.model_fields_set
            shrink = section.policy == "shrink" if given_here else current.groups.elastic
            Protection(engine, current, shrink, references)
        return engine, *others

    initialize.ft_original = original  # type: ignore[attr-defined]
    return initialize
