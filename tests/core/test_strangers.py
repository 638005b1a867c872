"""What scripts do with their weights before the restore: nobody can tell that these are not there."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from core.putting_off import check, plainly, putting_off, same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.random import get_rng_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from ft_core.state.watch import watch

# -- whoever reads ---------------------------------------------------------------------------------


def bytes_at(address: int, nbytes: int) -> list[int]:
    return list(ctypes.string_at(address, nbytes))


def saved(value: Any, **kwargs: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **kwargs)
    return file.getvalue()


def applied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.apply_(lambda x: 2 * x)


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor of some numbers": lambda w: torch.tensor([w[0], w[1]]),
    "as_tensor": lambda w: torch.as_tensor([w[0], w[1]], dtype=torch.float64),
    "asarray": lambda w: torch.asarray([w[0], w[1]]),
    "the class": lambda w: torch.Tensor([w[0], w[1]]),
    "a legacy class": lambda w: torch.FloatTensor([w[0], w[1]]),
    "new_tensor": lambda w: torch.zeros(1).new_tensor([[w[0], 1.0], [w[1], 2.0]]),
    "a tensor of itself": lambda w: torch.tensor(w),
    "a list of whole numbers": lambda w: torch.tensor([w.mul(10).long()[0]]),
    "an index": lambda w: torch.arange(40)[torch.tensor([x for x in (w * 9).abs().long()])],
    "full": lambda w: torch.full((2,), w[0]),
    "float": lambda w: [float(w[0]), int(w[1] * 100), bool(w[0] > 0), complex(w[0])],
    "item": lambda w: w[3].item(),
    "format": lambda w: f"{w[0]:.5f} {w}",
    "iteration": lambda w: [float(x) for x in w],
    "tolist": lambda w: w.tolist(),
    "apply_": applied,
    "map_": lambda w: torch.ones(40).map_(w, lambda x, y: x + y),
    "map2_": lambda w: torch.ones(40).map2_(w, w, lambda x, y, z: x + y * z),
    "numpy": lambda w: w.numpy().copy().tolist(),
    "np.asarray": lambda w: np.asarray(w).tolist(),
    "np.array": lambda w: np.array(w, dtype=np.float64).tolist(),
    "a function of numpy's": lambda w: np.add(w, 1).tolist(),
    "np.from_dlpack": lambda w: np.from_dlpack(w).tolist(),
    "to_dlpack": lambda w: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w)).clone(),
    "from_dlpack": lambda w: torch.from_dlpack(w).clone(),
    "an address": lambda w: bytes_at(w.data_ptr(), 160),
    "a storage's address": lambda w: bytes_at(w.untyped_storage().data_ptr(), 160),
    "a storage": lambda w: w.untyped_storage().tolist(),
    "bytes of a storage": lambda w: bytes(w.untyped_storage()).hex(),
    "a part of a storage": lambda w: w.untyped_storage()[4:12].tolist(),
    "a typed storage": lambda w: w.storage().tolist(),
    "a storage's copy": lambda w: w.untyped_storage().clone().tolist(),
    "a storage that is copied": lambda w: torch.UntypedStorage(160).copy_(w.untyped_storage()).tolist(),
    "a storage of another order": lambda w: _swapped(w.clone()),
    "a storage that is saved": lambda w: saved(w.untyped_storage()).hex(),
    "a storage that is pickled": lambda w: pickle.loads(pickle.dumps(w.storage())).tolist(),
    "torch.save": lambda w: torch.load(io.BytesIO(saved(w))),
    "torch.save, the old way": lambda w: torch.load(
        io.BytesIO(saved(w, _use_new_zipfile_serialization=False))
    ),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "copy": lambda w: copy.copy(w),
    "deepcopy": lambda w: copy.deepcopy(w),
    "shared memory": lambda w: w.clone().share_memory_(),
    "safetensors": lambda w: _through_safetensors(w),
    "its hash": lambda w: torch.hash_tensor(w),
    "a gradient's function": lambda w: torch.func.grad(lambda x: (x * w).sum())(torch.ones(40)),
    "vmap": lambda w: torch.vmap(lambda x: x * w)(torch.ones(3, 40)),
    "set_": lambda w: torch.empty(0).set_(w.untyped_storage()).sum(),
    "equal": lambda w: torch.equal(w, w.clone()),
    "numbers that it is drawn by": lambda w: torch.bernoulli(w.abs().clamp(max=1)),
}


def _through_safetensors(tensor: torch.Tensor) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load(safetensors.save({"w": tensor}))


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().byteswap(torch.float32)
    return tensor


def by_name(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_reader(name: str) -> None:
    def script() -> list[Any]:
        weight, other = torch.empty(40).normal_(), torch.empty(30).uniform_()
        return [by_name(READERS[name](weight)), other, weight]

    check(script)


def test_safetensors_writes_what_is_there(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def script() -> list[Any]:
        weights = {name: torch.empty(400).normal_() for name in "ab"}
        safetensors.save_file(weights, tmp_path / "model.safetensors")
        return [(tmp_path / "model.safetensors").read_bytes().hex()]

    check(script, put_off=False)


def test_who_has_an_address_reads_it_later() -> None:
    def script() -> list[Any]:
        weight = torch.empty(40).normal_()
        address = weight.data_ptr()
        weight.uniform_()
        return [bytes_at(address, 160), weight]

    check(script, put_off=False)


# -- whoever copies in inference mode ------------------------------------------------------------------

COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda w: w.to(torch.bfloat16),
    "to the same": lambda w: w.to(torch.float32),
    "contiguous": lambda w: w.t().contiguous(),
    "reshape": lambda w: w.t().reshape(-1),
    "reshape to a view": lambda w: w.reshape(-1),
    "flatten": lambda w: w.t().flatten(),
    "half": lambda w: w.half(),
    "double": lambda w: w.double(),
    "cpu": lambda w: w.cpu(),
    "clone": lambda w: w.clone(),
    "type_as": lambda w: w.type_as(torch.zeros(1, dtype=torch.float16)),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_could_be_a_view(name: str, mode: Callable[[], Any]) -> None:
    def script() -> list[Any]:
        with mode():
            weight = torch.empty(6, 8).normal_()
            made = COPIES[name](weight)
            in_place = made.mul_(2) if name.startswith("to") else made
        return [weight, made, in_place, torch.empty(30).uniform_()]

    check(script)


def test_weights_made_in_inference_mode_are_done_outside_of_it() -> None:
    def script() -> list[Any]:
        with torch.inference_mode():
            net = nn.Linear(6, 8)
            scaled = net.weight.detach().clone().mul_(2.0)
        return [net, scaled]

    check(script)


# -- operations that fail ------------------------------------------------------------------------------

FAILING: dict[str, Callable[[torch.Tensor], Any]] = {
    "a copy of another shape": lambda w: w.copy_(torch.zeros(7)),
    "a copy to another shape": lambda w: torch.zeros(7).copy_(w),
    "a negative deviation": lambda w: w.normal_(0, -1),
    "bounds in another order": lambda w: w.uniform_(1, -1),
    "weights of whole numbers": lambda w: torch.empty(40, dtype=torch.int64).normal_(),
    "numbers that do not fit": lambda w: w.long().mul_(0.5),
    "a clamp without bounds": lambda w: w.clamp_(),
    "memory that is its own": lambda w: w[:1].expand(40).mul_(2),
    "different sizes": lambda w: torch.cat([w.view(4, 10), torch.zeros(3, 3)]),
    "many copies": lambda w: torch._foreach_copy_([torch.zeros(3)], [w]),
    "a view": lambda w: w.view(7, 7),
    "nothing like it": lambda w: w @ torch.zeros(3),
    "a leaf": lambda w: nn.Parameter(w).mul_(2),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_operation_that_fails_fails_where_it_is(name: str) -> None:
    """With its own error; and nothing else is lost."""

    def script() -> list[Any]:
        before, weight = torch.empty(50).normal_(), torch.empty(40).normal_()
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            FAILING[name](weight)
        return [str(caught.value), before, weight, torch.empty(33).uniform_(), before.clone().mul_(3)]

    torch.empty(40).normal_(0, 1)  # a good one of that shape is known
    check(script)


def test_what_fails_when_it_is_done_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for it, say. It is done when somebody asks for it again."""
    expected, _ = plainly(lambda: [torch.empty(n).normal_() for n in (40, 50, 60)])
    with putting_off() as deferred:
        found, _ = plainly(lambda: [torch.empty(n).normal_() for n in (40, 50, 60)])
        go, times = deferred._generator.go, []

        def fail(position: Any) -> None:
            times.append(position)
            if len(times) == 2:
                raise MemoryError
            go(position)

        monkeypatch.setattr(deferred._generator, "go", fail)
        with pytest.raises(MemoryError):
            deferred.complete("the test wants to see it")
        deferred.complete("the test wants to see it")
        same(found, expected)
        assert len(times) == 4


# -- other threads -------------------------------------------------------------------------------------


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_that_draws() -> None:
    """It gets what it would have, and the others' go on from there."""

    def script() -> list[Any]:
        made = [torch.empty(1000).normal_(), in_a_thread(lambda: torch.rand(5))]
        made += [
            torch.empty(100).normal_(),
            in_a_thread(lambda: nn.Linear(20, 20)),
            torch.empty(50).uniform_(),
        ]
        with ThreadPoolExecutor(1) as pool:
            made += [pool.submit(torch.randperm, 10).result(), torch.empty(70).normal_()]
            made += [pool.submit(torch.get_rng_state).result(), pool.submit(torch.randn, 3).result()]
        return made

    check(script)


@pytest.mark.parametrize("name", ["a norm", "numpy", "a file", "a copy", "its end"])
def test_a_thread_that_reads(name: str) -> None:
    reads: dict[str, Callable[[torch.Tensor], Any]] = {
        "a norm": torch.norm,
        "numpy": lambda w: w.numpy().copy().tolist(),
        "a file": lambda w: saved(w).hex(),
        "a copy": lambda w: w.clone(),
        "its end": lambda w: w[-1].item(),
    }

    def script() -> list[Any]:
        weight, other = torch.empty(1000).normal_(), torch.empty(100).normal_()
        return [in_a_thread(lambda: reads[name](weight)), weight, other]

    check(script)


def test_threads_and_the_script_at_once() -> None:
    """Each weight is read by a thread while others are made."""

    def script() -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            weights, norms = [], []
            for _ in range(40):
                weights.append(torch.empty(5000).normal_())
                norms.append(pool.submit(torch.linalg.vector_norm, weights[-1]))
            return [*weights, *(norm.result() for norm in norms)]

    check(script, put_off=None)


# -- compiled code -------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """What torch's compiler was given."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], graphs: list[Any], **kwargs: Any) -> Callable[..., Any]:
    def backend(graph: Any, inputs: Any) -> Any:
        assert watch() is None
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, **kwargs)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("made", ["before", "meanwhile"])
def test_compiled_functions_are_compiled(graphs: list[Any], fullgraph: bool, made: str) -> None:
    function = compiled(lambda x: x * 2 + 1, graphs, fullgraph=fullgraph)
    with putting_off() as deferred:
        if made == "meanwhile":
            function = compiled(lambda x: x * 2 + 1, graphs, fullgraph=fullgraph)
        function(torch.ones(3))
        assert len(graphs) == 1
        first = nn.Linear(4, 5)
        assert deferred.skipped and not deferred.done
        torch.manual_seed(5)
        weight = torch.empty(60).normal_()
        found = function(weight)
        assert deferred.done == deferred.skipped
        skipped = deferred.skipped
        second = nn.Linear(4, 5)
        assert deferred.skipped > skipped
    count = len(graphs)
    assert torch.equal(function(torch.ones(3)), torch.full((3,), 3.0)) and len(graphs) == count
    torch.manual_seed(5)
    assert torch.equal(found, torch.empty(60).normal_() * 2 + 1)
    del first, second


def test_weights_made_by_compiled_functions(graphs: list[Any]) -> None:
    def script() -> list[Any]:
        weight = torch.empty(60).normal_()
        function = compiled(lambda x: x * 2 + torch.rand(60), graphs)
        return [function(weight), nn.Linear(7, 8), function(weight), nn.Linear(7, 8)]

    check(script)


def test_modules_that_are_compiled(graphs: list[Any]) -> None:
    def script() -> list[Any]:
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        net.compile(backend="eager")
        made = [net(torch.ones(3, 6)).detach(), nn.Linear(3, 3)]
        net(torch.ones(3, 6)).sum().backward()
        return [*made, net, *(p.grad for p in net.parameters())]

    check(script, put_off=False)


def test_a_modes_of_the_scripts_own_around_compiled_functions(graphs: list[Any]) -> None:
    """They are where they were."""

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    def script() -> list[Any]:
        with Counting() as counting:
            made = [torch.empty(60).normal_(), torch.jit.script(scripted)(torch.ones(3)), nn.Linear(4, 4)]
        made.append(counting.seen > 0)
        with Counting():
            compiled(lambda x: x + 1, [])(torch.ones(3))
            made.append(nn.Linear(4, 4))
        return [
            *made,
            torch.empty(50).normal_(),
            len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        ]

    expected, state = plainly(script)
    with putting_off() as deferred:
        found, left = plainly(script)
        assert torch.equal(left, state)
        deferred.complete("the test wants to see it")
    same(found[:-1], expected[:-1])
    assert watch() is None


def test_a_thread_that_calls_compiled_functions(graphs: list[Any]) -> None:
    """Nothing is put off from there on: its later operations would not be seen."""

    def script() -> list[Any]:
        weight, other = torch.empty(60).normal_(), torch.empty(60).normal_()
        function = compiled(lambda x: x + 1, graphs)
        found = in_a_thread(lambda: [function(weight), other.sum(), torch.rand(3)])
        return [*found, weight, torch.empty(30).normal_(), in_a_thread(lambda: torch.rand(3))]

    check(script, put_off=False)
    assert watch() is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_models_that_are_exported(strict: bool) -> None:
    def script() -> list[Any]:
        net = nn.Sequential(nn.Linear(3, 3))
        exported = torch.export.export(net, (torch.ones(1, 3),), strict=strict)
        return [exported.module()(torch.ones(1, 3)).detach(), net, nn.Linear(3, 3)]

    check(script)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_functions_that_are_traced(mode: str) -> None:
    def script() -> list[Any]:
        weight = torch.empty(40).normal_()
        graph = make_fx(lambda x: x * weight + 1, tracing_mode=mode, _allow_non_fake_inputs=True)(
            torch.ones(40)
        )
        return [graph(torch.ones(40)), str(graph.code).count("mul"), weight, nn.Linear(3, 3)]

    check(script)


def test_weights_that_are_fake() -> None:
    def script() -> list[Any]:
        before = nn.Linear(3, 3)
        with FakeTensorMode():
            fake = nn.Linear(5, 5)
        return [before, type(fake.weight.data).__name__, nn.Linear(4, 4)]

    check(script)


@pytest.mark.parametrize("name", ["a number", "numpy"])
def test_what_vmapped_functions_read(name: str) -> None:
    def script() -> list[Any]:
        weight = torch.empty(40).normal_()
        read = {"a number": lambda: float(weight[0]), "numpy": lambda: float(weight.numpy().sum())}[name]
        return [torch.vmap(lambda x: x * read())(torch.ones(3, 2)), weight]

    check(script, put_off=False)


def scripted(x: torch.Tensor) -> torch.Tensor:
    """What TorchScript is made of."""
    return x * 2 + 1


def test_torchscript() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.linear(x) * 2

    def script() -> list[Any]:
        function, weight, net = torch.jit.script(scripted), torch.empty(40).normal_(), torch.jit.script(Net())
        made = [function(weight), net(torch.ones(2, 5)).detach(), torch.empty(70).normal_()]
        traced = torch.jit.trace(lambda x: x + weight, torch.ones(40))
        return [*made, traced(torch.ones(40)), net.linear.weight, torch.empty(70).normal_()]

    check(script)


def test_the_compiler_may_be_imported_meanwhile() -> None:
    """And is as it was, afterwards."""
    script = """
import sys, torch
from torch import nn
from ft_core.state.deferred import Deferred
deferred = Deferred()
deferred.begin()
linear = nn.Linear(4, 4)
assert "torch._dynamo" not in sys.modules, "the compiler is slow to import"
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
function = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
function(linear.weight)
assert len(graphs) == 1 and deferred.done == deferred.skipped == 20
nn.Linear(4, 4)
assert deferred.skipped == 40
deferred.end()
from torch._dynamo import eval_frame
assert eval_frame.set_eval_frame is eval_frame._maybe_set_eval_frame
assert eval_frame.set_eval_frame is torch._C._dynamo.eval_frame.set_eval_frame
assert type(eval_frame.set_eval_frame).__name__ == "builtin_function_or_method"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# -- other processes -----------------------------------------------------------------------------------


class OfWeights(Dataset[torch.Tensor]):
    """Samples that look at a model's weights."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.weights[index].detach()[:3] + torch.rand(3)


def test_loaders_whose_workers_look_at_weights() -> None:
    def script() -> list[Any]:
        weights = [torch.empty(100).normal_() for _ in range(6)]
        batches = list(DataLoader(OfWeights(weights), batch_size=2, num_workers=2, shuffle=True))
        return [*batches, *weights, torch.empty(40).normal_()]

    check(script)


@pytest.mark.parametrize("wants", ["one weight", "no weight", "numbers"])
def test_a_forked_process_does_what_it_reads(wants: str) -> None:
    def script() -> tuple[Any, Any]:
        torch.manual_seed(5)
        return [torch.empty(1000).normal_() for _ in range(4)], torch.rand(3)

    weights, drawn = script()
    expected = {"one weight": weights[2].sum().item(), "no weight": 1.0, "numbers": drawn.sum().item()}
    with putting_off() as deferred:
        torch.manual_seed(5)
        weights = [torch.empty(1000).normal_() for _ in range(4)]
        reader, writer = os.pipe()
        gc.collect()
        if not (pid := os.fork()):
            found = {
                "one weight": lambda: weights[2].sum().item(),
                "no weight": lambda: torch.ones(1).item(),
                "numbers": lambda: torch.rand(3).sum().item(),
            }[wants]()
            os.write(writer, pickle.dumps((found, deferred.done)))
            os._exit(0)
        os.waitpid(pid, 0)
        found = pickle.loads(os.read(reader, 1000))
        os.close(reader)
        os.close(writer)
        assert found == (expected[wants], 1000 if wants == "one weight" else 0)
        assert not deferred.done


def test_a_forked_process_of_a_parent_that_has_threads() -> None:
    """It has none of them, and does not wait for what they are to do."""
    torch.set_num_threads(4)  # also for what is expected: a sum depends on it
    expected, _ = plainly(lambda: torch.empty(3000, 1000).normal_().double().sum().item())
    torch.ones(3000, 1000).mul_(2).add_(torch.ones(3000, 1000)).sum()
    with putting_off():
        torch.manual_seed(5)
        weight = torch.empty(3000, 1000).normal_().double().clone()
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            values = weight.numpy()
            os.write(writer, pickle.dumps((float(values[0, 0]), torch.get_num_threads())))
            os._exit(0)
        os.waitpid(pid, 0)
        found = pickle.loads(os.read(reader, 1000))
        os.close(reader)
        os.close(writer)
        assert found == (weight[0, 0].item(), 4) and weight.sum().item() == expected


def test_a_state_that_is_asked_for_by_a_function_that_was_imported_before() -> None:
    def script() -> list[Any]:
        return [torch.empty(100).normal_(), get_rng_state(), torch.empty(100).uniform_()]

    check(script)


def test_a_process_that_is_forked_where_nothing_is_put_off_is_an_ordinary_one() -> None:
    with putting_off():
        if not (pid := os.fork()):
            os._exit(watch() is not None)
        assert os.waitpid(pid, 0)[1] == 0
        assert watch() is not None


# -- memory --------------------------------------------------------------------------------------------


def test_weights_of_which_parts_are_cut_are_made_one_by_one() -> None:
    """What is done needs as much memory as it would have."""
    script = """
import resource, torch
from ft_core.state.deferred import Deferred
deferred = Deferred()
deferred.begin()
torch.set_num_threads(1)
parts = []
for _ in range(20):
    whole = torch.empty(1 << 12, 1 << 10).normal_()
    parts.append(torch.empty(1 << 9, 1 << 10))
    parts[-1].copy_(whole[512:1024])
del whole
torch.empty(1 << 10).normal_().sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
deferred.complete("the test wants to see it")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=120, capture_output=True, text=True
    )
    assert int(found.stdout) < (40 + 3 * 16) << 10  # the parts, and some wholes; all would be 320 MiB


def test_who_reads_one_weight_has_that_one_drawn() -> None:
    with putting_off() as deferred:
        weights = [torch.empty(100).normal_() for _ in range(5)]
        copies = [weight.clone() for weight in weights]
        copies[3].sum()
        assert deferred.done == 100
        weights[3].add_(1)  # it has content
        weights[1].add_(1).sum()
        assert deferred.done == 200
        del copies


def test_what_nobody_has_any_more_is_not_drawn() -> None:
    with putting_off() as deferred:
        kept, gone = torch.empty(100).normal_(), torch.empty(100).normal_()
        del gone
        deferred.complete("the test wants to see it")
        assert deferred.done == 100 and kept.isfinite().all()


def test_what_is_gone_is_forgotten() -> None:
    """A script may make any number of tensors before it trains."""
    with putting_off() as deferred:
        for _ in range(10000):
            torch.zeros(3)
        assert len(deferred._own) < 3000


# -- what a script has for torch's functions -------------------------------------------------------------


class Calls(TorchFunctionMode):
    """Of functions that the script calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_functions_that_the_script_looks_at() -> None:
    def script() -> list[Any]:
        with Calls() as calls:
            weight = torch.empty(40).normal_()
            made = [weight.clone().mul_(2), weight.norm(), float(weight[0]), torch.cat([weight, weight])]
        return [weight, *made, *calls.seen]

    check(script, put_off=False)


@pytest.mark.parametrize("everywhere", [False, True])
def test_another_device_by_default(everywhere: bool) -> None:
    def script() -> list[Any]:
        with torch.device("cpu" if everywhere else "meta"):
            if everywhere:
                torch.set_default_device("meta")
            try:
                ghost = nn.Linear(3, 3, device="meta")
                weight = torch.empty(40, device="cpu").normal_()
                made = [weight.clone(), weight.double(), weight.norm(), torch.cat([weight, weight]).mul_(2)]
                weight[:3].mul_(3)
            finally:
                torch.set_default_device(None)
        return [ghost.weight.is_meta, weight, *made, torch.empty(50).uniform_()]

    check(script)


def test_a_class_with_functions_of_its_own() -> None:
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "storage" not in getattr(func, "__name__", "")
            return super().__torch_function__(func, types, args, kwargs or {})

    def script() -> list[Any]:
        weight = torch.empty(40).normal_()
        odd = weight.as_subclass(Odd)
        return [odd.numpy().copy().tolist(), float(odd[0]), weight, torch.empty(50).uniform_()]

    check(script)


# -- a stranger's start-up -------------------------------------------------------------------------------


def initialised(module: nn.Module) -> None:
    """As transformers' models have it."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()
    elif isinstance(module, nn.LayerNorm):
        module.bias.data.zero_()
        module.weight.data.fill_(1.0)


def model() -> nn.Sequential:
    """A small one of a few kinds of layers."""
    return nn.Sequential(
        nn.Embedding(50, 16, padding_idx=1), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 50)
    )


def as_transformers() -> list[Any]:
    """With tied weights."""
    net = model()
    net.apply(initialised)
    net[3].weight = net[0].weight
    return [net, next(net.parameters()) is net[3].weight]


def with_an_average() -> list[Any]:
    """Of the weights, from their start."""
    net = model()
    average = copy.deepcopy(net).requires_grad_(False)
    for kept, weight in zip(average.parameters(), net.parameters(), strict=True):
        kept.mul_(0.9).add_(weight.detach(), alpha=0.1)
    return [net, average]


def with_shadows() -> list[Any]:
    """Clones of the weights, and a dictionary of them."""
    net = model()
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
    state = {name: value.clone().to(torch.bfloat16) for name, value in net.state_dict().items()}
    other = model()
    other.load_state_dict(net.state_dict())
    return [net, *shadow.values(), *state.values(), other]


def saved_at_its_start(path: Path) -> list[Any]:
    """To a file, which it reads again."""
    net = model()
    torch.save(net.state_dict(), path)
    other = model()
    other.load_state_dict(torch.load(path))
    return [net, other]


def seeds_in_the_middle() -> list[Any]:
    """And random numbers of others' in between."""
    made: list[Any] = [model(), np.random.RandomState(3).rand()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        made += [model(), torch.rand(3)]
    made += [nn.Dropout(0.5)(torch.ones(20)), model()]
    torch.manual_seed(7)
    seed, state = torch.initial_seed(), torch.get_rng_state()
    made += [model(), torch.randint(10, (5,)), seed]
    torch.set_rng_state(state)
    made.append(model())
    torch.seed()
    torch.manual_seed(5)
    return [*made, torch.randperm(20)]


def of_slices() -> list[Any]:
    """As fused projections are initialised; and kinds of initialisation that look at what they make."""
    fused, conv = nn.Linear(16, 48), nn.Conv2d(3, 8, 3)
    for part in fused.weight.data.chunk(3):
        nn.init.xavier_uniform_(part)
    nn.init.trunc_normal_(fused.weight[:16], std=0.02)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    nn.init.orthogonal_(fused.weight.data[16:32])
    with torch.no_grad():
        fused.weight[32:].normal_().mul_(0.1)
        fused.bias[:5] = 3.0
        fused.bias[5:].uniform_()
        conv.weight[:, 0] = conv.weight[:, 1]
        conv.bias.copy_(conv.weight.sum((1, 2, 3)))
    nn.init.dirac_(nn.Parameter(conv.weight.data[:3]))
    nn.init.eye_(fused.weight.data[:16])
    return [fused, conv]


def with_optimizers(kind: str) -> list[Any]:
    """That are there before or after the cast to another type."""
    net = model()
    if kind == "before":
        torch.optim.AdamW(net.parameters(), lr=0.1)
        net = net.to(torch.float64).to(torch.float32)
    net.bfloat16()
    if kind == "half":
        net.half()
    main = [p.detach().clone().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.SGD(main, lr=0.1, momentum=0.9)
    for p in main:
        p.grad = torch.ones_like(p)
    if kind == "step":
        optimizer.step()
        optimizer.zero_grad()
    flat_weights = nn.utils.parameters_to_vector(main)
    return [net, *main, flat_weights, nn.utils.clip_grad_norm_(main, 1.0) if kind != "step" else 0]


STRANGERS: dict[str, Callable[[], list[Any]]] = {
    "transformers": as_transformers,
    "an average": with_an_average,
    "shadows": with_shadows,
    "seeds": seeds_in_the_middle,
    "slices": of_slices,
    **{f"optimizers, {kind}": partial(with_optimizers, kind) for kind in ("before", "after", "half", "step")},
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_start_up(name: str) -> None:
    def script() -> list[Any]:
        return [*STRANGERS[name](), torch.empty(40).normal_()]

    check(script)


def test_memory_that_is_cast_before_it_is_filled() -> None:
    """As DeepSpeed makes weights in another type."""

    def script() -> list[torch.Tensor]:
        weights = [torch.empty(40).to(torch.bfloat16), torch.zeros(40).clone()]
        return [weight.normal_() for weight in weights]

    with putting_off() as deferred:
        script()
        assert deferred.skipped == 80
    check(script)


def test_a_start_up_that_saves(tmp_path: Path) -> None:
    check(lambda: [*saved_at_its_start(tmp_path / "model.pt"), torch.empty(40).normal_()])


def test_a_real_models_start_up() -> None:
    transformers = pytest.importorskip("transformers")

    def script() -> list[Any]:
        config = transformers.GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        net = transformers.GPT2LMHeadModel(config)
        return [net, net(torch.arange(10)[None]).logits.detach(), torch.empty(40).normal_()]

    check(script)
