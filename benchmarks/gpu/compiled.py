"""Row "compiled": CUDA graphs, torch.compile, fp8: snapshots of what they change, or the reason why not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from benchmarks.gpu.checks import NotThereError, Row, main
from benchmarks.gpu.consistency import Training
from benchmarks.gpu.state import Copying, Tensors, checksums_of

STEPS = 50


def staged(training: Training, forward_backward: Callable[[], None]) -> int:
    """How many of `STEPS` snapshots hold something else than the step made."""
    copying = Copying(Tensors(training.tensors))
    wrong = 0
    for version in range(STEPS):
        forward_backward()
        training.optimizer.step()
        copying.snapshotter.stage(version)
        right = {name: tensor.clone() for name, tensor in training.tensors().items()}
        copying.snapshotter.wait()
        wrong += copying.checksums(version) != checksums_of(right)
    return wrong


def _graph(training: Training) -> torch.cuda.CUDAGraph:
    """Of a forward and backward pass. Its gradients stay where they are."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.forward_backward()
    torch.cuda.current_stream().wait_stream(side)
    training.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (training.model(training.inputs) - training.inputs).square().mean().backward()
    return graph


def replayed(row: Row) -> None:
    """A captured pass is replayed between snapshots."""
    if row.device == "cpu":
        raise NotThereError("graphs are a device's")
    training = Training(row.device, 512, {"fused": True})
    graph = _graph(training)
    wrong = staged(training, graph.replay)
    row.tell("CUDA graph of a pass, replayed", not wrong, f"{wrong} of {STEPS} snapshots differ")


def captured(row: Row) -> None:
    """A pass is captured while a snapshot is under way. CUDA may refuse that: then it says so."""
    if row.device == "cpu":
        raise NotThereError("graphs are a device's")
    big = torch.ones(4 << 30, dtype=torch.uint8, device=row.device)  # long enough
    copying = Copying(Tensors(lambda: {"big": big}))
    copying.whole(0)
    copying.whole(1)
    training = Training(row.device, 512, {"fused": True})
    training.forward_backward()  # what is slow the first time
    torch.cuda.synchronize()
    check = "CUDA graph, captured during a copy"
    copying.snapshotter.stage(2)
    try:
        _graph(training).replay()
        torch.cuda.synchronize()
        copying.snapshotter.wait()
    except RuntimeError as error:
        row.tell(check, "seen", f"refused: {str(error).splitlines()[0][:90]}")
        return
    right = copying.checksums(2) == checksums_of({"big": big})
    row.tell(check, right, "works" if right else "the copy is wrong")


def compiled(row: Row) -> None:
    """A compiled pass between snapshots."""
    training = Training(row.device, 512 if row.device == "cuda" else 64, {"foreach": True})
    # On the host the compiler would take longer than all the rest.
    model = torch.compile(training.model, backend="inductor" if row.device == "cuda" else "aot_eager")

    def forward_backward() -> None:
        training.optimizer.zero_grad()
        (model(training.inputs) - training.inputs).square().mean().backward()

    wrong = staged(training, forward_backward)
    row.tell("torch.compile", not wrong, f"{wrong} of {STEPS} snapshots differ")


def fp8(row: Row) -> None:
    """Transformer Engine's linear layers with fp8 weights' scales beside them."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise NotThereError("transformer-engine is not installed")
    import transformer_engine.pytorch as te

    training = Training(row.device, 512, {"fused": True})
    layers = [te.Linear(512, 512, params_dtype=torch.bfloat16) for _ in range(2)]
    training.model = torch.nn.Sequential(*layers).to(row.device)
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=1e-3, fused=True)

    def forward_backward() -> None:
        training.optimizer.zero_grad()
        with te.fp8_autocast(enabled=True):
            out = training.model(training.inputs)
        (out - training.inputs).square().mean().backward()

    wrong = staged(training, forward_backward)
    row.tell("fp8 (Transformer Engine)", not wrong, f"{wrong} of {STEPS} snapshots differ")


def apex(row: Row) -> None:
    """Its fused Adam."""
    if importlib.util.find_spec("apex") is None:
        raise NotThereError("apex is not installed")
    from apex.optimizers import FusedAdam

    training = Training(row.device, 512, {"fused": True})
    training.optimizer = FusedAdam(training.model.parameters(), lr=1e-3)
    wrong = staged(training, training.forward_backward)
    row.tell("Adam of apex", not wrong, f"{wrong} of {STEPS} snapshots differ")


def body(row: Row) -> None:
    """All checks of the row."""
    checks: dict[str, Callable[[Row], None]] = {
        "CUDA graph of a pass, replayed": replayed,
        "torch.compile": compiled,
        "fp8 (Transformer Engine)": fp8,
        "Adam of apex": apex,
        "CUDA graph, captured during a copy": captured,  # last: what is refused may leave its stream unusable
    }
    for check, make in checks.items():
        row.on_device(check, _of(row, make))


def _of(row: Row, make: Callable[[Row], None]) -> Callable[[], None]:
    return lambda: make(row)


if __name__ == "__main__":
    main("compiled", body)
