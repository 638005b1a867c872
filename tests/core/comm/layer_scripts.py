"""What the roles of `test_torch_layers.py` do: torch's newer layers over process groups, each once."""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed import nn as autograd_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from ft_core.adapter import Adapter, StateTensor
from ft_core.comm.collectives import FtProcessGroup
from ft_core.errors import EpochChanged
from ft_core.worker import session


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def functional(rank: int, world: int, meshes: Meshes) -> dict[str, Any]:
    """All functional collectives, with and without autograd, waited for by whoever touches the result."""
    group: Any = dist.group.WORLD
    out: dict[str, Any] = {}
    mine = lambda *shape: numbers(*shape, seed=rank)  # noqa: E731
    out["all_reduce"] = funcol.all_reduce(mine(4), "sum", group) + 1
    out["all_reduce max"] = funcol.all_reduce(mine(4), "max", group).wait()
    out["all_gather"] = funcol.all_gather_single(mine(2, 3), 0, group) + 1
    out["all_gather along 1"] = funcol.all_gather_single(mine(2, 3), 1, group) + 1
    out["reduce_scatter"] = funcol.reduce_scatter_single(mine(world, 3), "sum", 0, group) + 1
    out["reduce_scatter along 1"] = funcol.reduce_scatter_single(mine(2, world), "sum", 1, group) + 1
    out["all_to_all"] = funcol.all_to_all_single(mine(world, 2), None, None, group) + 1
    uneven = [[r + c + 1 for c in range(world)] for r in range(world)]
    gets, gives = [row[rank] for row in uneven], uneven[rank]
    out["all_to_all, uneven"] = funcol.all_to_all_single(mine(sum(gives)), gets, gives, group) + 1
    out["broadcast"] = funcol.broadcast(mine(3), 1, group) + 1
    out["permute"] = funcol.permute_tensor(mine(3), [(i + 1) % world for i in range(world)], group) + 1
    reduced = funcol.all_reduce_coalesced([mine(2), mine(3)], "sum", group)
    out["all_reduce_coalesced"] = [t + 1 for t in reduced]
    gathered = funcol.all_gather_single_coalesced([mine(2), mine(3)], group)
    out["all_gather_coalesced"] = [t + 1 for t in gathered]
    shards = funcol.reduce_scatter_single_coalesced([mine(world), mine(world, 2)], "sum", [0, 0], group)
    out["reduce_scatter_coalesced"] = [t + 1 for t in shards]
    left = funcol.all_reduce(mine(4), "sum", group)
    assert isinstance(left, funcol.AsyncCollectiveTensor)
    view = left.view(2, 2)
    out["a view that waits for nothing"] = isinstance(view, funcol.AsyncCollectiveTensor)
    out["a view"] = view + 1
    out["a list"] = funcol.all_reduce(mine(2), "sum", group).tolist()
    del left, view
    funcol.all_reduce(mine(4), "sum", group)  # nobody waits
    for name, call in {
        "all_gather": lambda t: funcol.all_gather_single_autograd(t, 0, group),
        "reduce_scatter": lambda t: funcol.reduce_scatter_single_autograd(t, "sum", 0, group),
        "all_to_all": lambda t: funcol.all_to_all_single_autograd(t, None, None, group),
        "all_reduce": lambda t: funcol.all_reduce(t, "sum", group),
    }.items():
        leaf = mine(world, 2).requires_grad_()
        result = call(leaf)
        (result.sin() * (rank + 1)).sum().backward()
        out[f"autograd {name}"] = [result.detach() + 0, leaf.grad]
    return out


def with_autograd(rank: int, world: int, meshes: Meshes) -> dict[str, Any]:
    """`torch.distributed.nn.functional`: forward and backward."""
    of, out = autograd_collectives.functional, {}
    zeros = torch.zeros
    cases: dict[str, Callable[[torch.Tensor], Any]] = {
        "broadcast": lambda t: of.broadcast(t, 0),
        "gather": lambda t: of.gather(t, 1),
        "scatter": lambda t: of.scatter([t * i for i in range(1, world + 1)], 0),
        "reduce": lambda t: of.reduce(t, 1),
        "reduce_scatter": lambda t: of.reduce_scatter(zeros(world, 2), [t * i for i in range(1, world + 1)]),
        "all_gather": lambda t: of.all_gather(t),
        "all_to_all": lambda t: of.all_to_all(
            [zeros(world, 2) for _ in range(world)], [t * i for i in range(1, world + 1)]
        ),
        "all_to_all_single": lambda t: of.all_to_all_single(zeros(world, 2), t),
        "all_reduce": lambda t: of.all_reduce(t),
    }
    if True:
        for name, call in cases.items():
            leaf = numbers(world, 2, seed=rank).requires_grad_()
            result = call(leaf)
            parts = result if isinstance(result, (list, tuple)) else [result]
            sum((part.sin() * (rank + 1)).sum() for part in parts).backward()  # type: ignore[union-attr]
            told = name != "reduce" or rank == 1  # what the others have of it is nothing in particular
            out[name] = [[part.detach() + 0 for part in parts] if told else None, leaf.grad]
    return out


class Meshes:
    """All there is to communicate over, made once, as models that outlive an epoch would have it."""

    def __init__(self, world: int) -> None:
        self.line = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
        if world == 4:
            self.plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            self.flat = self.plane._flatten("both")
            self.turned = DeviceMesh("cpu", torch.arange(4).view(2, 2).t().contiguous())


def dtensor(rank: int, world: int, meshes: Meshes) -> dict[str, Any]:
    """Sharding, each change of it, products, and meshes of one and two dimensions."""
    out: dict[str, Any] = dealt_out(rank, world, meshes)
    line = meshes.line
    whole = numbers(2 * world + 1, 3)  # uneven shards
    places: dict[str, Any] = {"row": Shard(0), "column": Shard(1), "copy": Replicate()}
    for name, place in places.items():
        given = distribute_tensor(whole, line, [place])
        for other, target in places.items():
            out[f"{name} to {other}"] = given.redistribute(line, [target]).to_local() + 0
    partial = DTensor.from_local(numbers(2 * world, 4, seed=rank), line, [Partial()])
    for other, target in places.items():
        out[f"partial to {other}"] = partial.redistribute(line, [target]).to_local() + 0
    a, b = numbers(4, 2 * world), numbers(2 * world, 4, seed=1)
    for name, (left, right) in {"inner": (Shard(1), Shard(0)), "outer": (Shard(0), Replicate())}.items():
        x = distribute_tensor(a, line, [left]).requires_grad_()
        y = distribute_tensor(b, line, [right]).requires_grad_()
        product = x @ y
        product.sin().sum().backward()
        out[f"{name} product"] = [whole_of(t) for t in (product, x.grad, y.grad)]
    if world == 4:
        for mesh in (meshes.plane, meshes.turned):
            given = distribute_tensor(numbers(4, 6), mesh, [Shard(0), Shard(1)])
            out["crossed"] = given.redistribute(mesh, [Shard(1), Replicate()]).to_local() + 0
            same = distribute_tensor(numbers(8, 6), mesh, [Shard(0), Shard(0)])
            out["twice"] = [same.to_local(), same.redistribute(mesh, [Replicate(), Shard(0)]).to_local() + 0]
    return out


def dealt_out(rank: int, world: int, meshes: Meshes) -> dict[str, Any]:
    """What start-up does to make parameters of plain tensors, and to look at them."""
    out: dict[str, Any] = {}
    line = meshes.line
    whole = numbers(2 * world + 1, 3)
    for name, place in {"row": Shard(0), "column": Shard(1), "copy": Replicate()}.items():
        given = distribute_tensor(whole + rank, line, [place])  # that of the first is what counts
        out[name] = [given.to_local(), whole_of(given)]
    large = distribute_tensor(numbers(400, 1000) + rank, line, [Shard(0)])  # larger than what is on record
    out["large"] = list(large.to_local().shape)  # a restore fills it
    out["counts"] = distribute_tensor(torch.arange(2 * world) + rank, line, [Shard(0)]).to_local()
    out["mean"] = whole_of(distribute_tensor(whole, line, [Shard(0)]).mean(0))
    out["from local"] = whole_of(DTensor.from_local(numbers(2, seed=rank), line, [Shard(0)]))
    out["checked"] = DTensor.from_local(torch.ones(2), line, [Replicate()], run_check=True).to_local()
    if world == 4:
        plane, flat = meshes.plane, meshes.flat
        dp, tp = plane["dp"], plane["tp"]
        out["ranks"] = [dp.mesh.tolist(), tp.mesh.tolist(), plane.get_coordinate(), flat.mesh.tolist()]
        for mesh in (plane, meshes.turned):
            given = distribute_tensor(numbers(4, 6), mesh, [Shard(0), Shard(1)])
            out["both ways"] = [given.to_local(), whole_of(given)]
        for name, mesh in {"dp": dp, "tp": tp, "both": flat}.items():
            t = torch.tensor([float(rank)])
            dist.all_reduce(t, group=mesh.get_group())
            out[f"sum of {name}"] = t
            out[f"in {name}"] = whole_of(distribute_tensor(numbers(5, 2), mesh, [Shard(0)]))
            out[f"ranks of {name}"] = dist.get_process_group_ranks(mesh.get_group())
    return out


def whole_of(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


class Block(nn.Module):
    """A block as tensor parallelism takes it apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def train(
    model: nn.Module, loss: Callable[[int], Any], steps: int = 3, micro: int = 1, clip: bool = True
) -> list[Any]:
    """Losses and weights of some steps of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    told = []
    for step in range(steps):
        for part in range(micro):
            value = loss(step * micro + part)
            value.backward()
            told.append(value.detach())
        if clip:  # where all are of a kind
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*map(whole_of, told), *map(whole_of, model.parameters())]


def tensor_parallel(rank: int, world: int, meshes: Meshes) -> dict[str, Any]:
    """Columns, rows, sequence, and a loss over a vocabulary in parts."""
    mesh = meshes.line
    torch.manual_seed(0)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    plain = parallelize_module(Block(), mesh, plan)
    out = {
        "columns and rows": train(plain, lambda i: plain(numbers(4, 8, seed=i)).square().mean(), clip=False)
    }
    torch.manual_seed(1)
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
    }
    sequence = parallelize_module(Block(), mesh, plan)
    sequence = parallelize_module(
        sequence,
        mesh,
        {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))},
    )
    mine = lambda i: numbers(2, 2 * world, 8, seed=i).chunk(world, 1)[rank].contiguous()  # noqa: E731
    out["sequence"] = train(sequence, lambda i: sequence(mine(i)).square().mean(), clip=False)
    torch.manual_seed(2)
    vocabulary = nn.Sequential(nn.Embedding(4 * world, 8), nn.Linear(8, 4 * world))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    vocabulary = parallelize_module(vocabulary, mesh, plan)

    def words(i: int) -> torch.Tensor:
        return torch.randint(0, 4 * world, (6,), generator=torch.Generator().manual_seed(i))

    optimizer = torch.optim.SGD(vocabulary.parameters(), lr=0.5)
    told = []
    for i in range(3):
        with loss_parallel():
            loss = F.cross_entropy(vocabulary(words(i)), words(i + 9))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(whole_of(loss))
    out["loss in parts"] = [told, [*map(whole_of, vocabulary.parameters())]]
    return out


def sharded(rank: int, world: int, meshes: Meshes) -> dict[str, Any]:
    """FSDP2: plain, mixed precision, accumulated, and hybrid."""
    out: dict[str, Any] = {}

    def made(mesh: Any, **options: Any) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(Block(), Block())
        for block in model:
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def loss(model: nn.Module) -> Callable[[int], Any]:
        return lambda i: model(numbers(2, 8, seed=100 * i + rank)).square().mean()

    line = meshes.line
    model = made(line)
    out["plain"] = train(model, loss(model))
    model = made(line, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    out["mixed"] = train(model, loss(model))
    accumulated = made(line, reshard_after_forward=False)

    def last_alone(i: int) -> Any:
        accumulated.set_requires_gradient_sync(i % 2 == 1)  # type: ignore[operator]
        return loss(accumulated)(i)

    out["accumulated"] = train(accumulated, last_alone, micro=2)
    if world == 4:
        plane = meshes.plane
        model = made(plane)
        out["hybrid"] = train(model, loss(model))
        torch.manual_seed(4)
        both = parallelize_module(Block(), plane["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        both = fully_shard(both, mesh=plane["dp"])
        out["with tensor parallelism"] = train(
            both, lambda i: both(numbers(2, 8, seed=100 * i + rank // 2)).square().mean(), clip=False
        )
    return out


def pipelined(rank: int, world: int, meshes: Meshes) -> dict[str, Any]:
    """Each schedule over two stages, or two each."""
    out: dict[str, Any] = {}
    group: Any = dist.group.WORLD
    if world == 4:
        group, rank = meshes.plane["tp"].get_group(), meshes.plane["tp"].get_local_rank()
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        many = 2 if schedule is ScheduleInterleaved1F1B else 1
        torch.manual_seed(5)
        blocks = [Block() for _ in range(2 * many)]
        mine = [rank + 2 * i for i in range(many)]
        stages = [PipelineStage(blocks[i], i, 2 * many, torch.device("cpu"), group=group) for i in mine]
        square = lambda y, t: (y - t).square().mean()  # noqa: E731
        run: Any = schedule(stages if many > 1 else stages[0], 4, loss_fn=square)
        weights = [p for i in mine for p in blocks[i].parameters()]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        losses: list[torch.Tensor] = []
        for step in range(2):
            x, target = numbers(8, 8, seed=step), numbers(8, 8, seed=step + 50)
            given = [x] if rank == 0 else []
            last = {"target": target, "losses": losses} if rank == 1 else {}
            run.step(*given, **last)
            optimizer.step()
            optimizer.zero_grad()
        out[schedule.__name__] = [[loss.detach() for loss in losses], [w.detach().clone() for w in weights]]
    return out


LAYERS = {
    "functional": functional,
    "with_autograd": with_autograd,
    "dealt_out": dealt_out,
    "dtensor": dtensor,
    "tensor_parallel": tensor_parallel,
    "pipelined": pipelined,
    "sharded": sharded,
}


def to_the_bit(value: Any) -> Any:
    """Tensors as plain data: they cross a pipe after their process may have ended."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.detach().double().flatten().tolist()
    if isinstance(value, (list, tuple)):
        return [to_the_bit(v) for v in value]
    return {k: to_the_bit(v) for k, v in value.items()} if isinstance(value, dict) else value


def of_each(rank: int, world: int, meshes: Meshes, names: tuple[str, ...]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: to_the_bit(LAYERS[name](rank, world, meshes)) for name in names}


def bare(rank: int, world: int, port: int, sender: Any) -> None:
    """The reference: the same over torch's own gloo."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sender.send(of_each(rank, world, Meshes(world), tuple(LAYERS)))
    dist.barrier()


def stops(worker: Any, at: int) -> None:
    """This worker is lost when it comes to that operation, counted from here."""
    original, left = FtProcessGroup._issue, itertools.count(at, -1)

    def issue(*args: Any) -> Any:
        if next(left) == 0:
            worker.tell("stopped")
            threading.Event().wait()
        return original(*args)

    FtProcessGroup._issue = issue  # type: ignore[method-assign]


def before_training(worker: Any, names: tuple[str, ...], lost: int = -1, at: int = 0) -> dict[str, Any]:
    """All in start-up. One role is lost at an operation of it, and again once training has begun."""
    dist.init_process_group("gloo")
    if worker.role == lost and worker.epoch == 1:
        stops(worker, at)
    meshes = Meshes(worker.world)
    found = of_each(worker.role, worker.world, meshes, names)
    worker.begin_training()
    while lost >= 0:
        try:
            dist.barrier()
            if worker.epoch == 3:
                break
            worker.tell("trains")
            dist.recv(torch.zeros(1), (worker.role + 1) % worker.world)  # which nobody sends
        except EpochChanged:
            worker.next_epoch()
    return found


def in_training(worker: Any, names: tuple[str, ...], lost: int = -1, at: int = 0) -> dict[str, Any]:
    """All in training. After a role is lost at an operation of it, all begin it again, in the same groups."""
    dist.init_process_group("gloo")
    meshes = Meshes(worker.world)
    worker.begin_training()
    if worker.role == lost and not worker.newcomer:
        stops(worker, at)
    while True:
        try:
            found = of_each(worker.role, worker.world, meshes, names)
            dist.barrier()
            return found
        except Exception:  # also what torch makes of it, or what comes of garbage
            if worker.pending == worker.epoch:
                raise
            worker.next_epoch()


class Counted(Block):
    """A stage whose forward pass leaves something behind, as a running statistic does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return super().forward(x)


class Alone(Adapter):
    """Models whose state is each role's own."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.ring = model, optimizer, (dist.get_rank(),)

    def _all(self) -> Iterator[tuple[str, Any]]:
        yield from self.model.state_dict().items()
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in sorted(self.optimizer.state[parameter].items()):
                yield f"{key} {index}", value

    def tensors(self) -> Iterator[StateTensor]:
        for name, tensor in self._all():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            counts = name.endswith("passes")  # it changes before the optimizer's step
            yield StateTensor(name, local.detach(), self.ring, volatile=counts)

    def envelope(self) -> Any:
        return None

    def envelope_holders(self) -> tuple[int, ...]:
        return self.ring

    def restore(self, tensors: Any, envelope: Any) -> None:
        if not any(name.startswith("exp_avg") for name in tensors):  # they come with the first step
            self.optimizer.state.clear()
        elif not self.optimizer.state:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            before = {name: value.clone() for name, value in tensors.items()}
            self.optimizer.step()
            tensors = before
        for tensor in self.tensors():
            if tensor.name in tensors:
                tensor.tensor.copy_(tensors[tensor.name])

    def reset(self) -> None:
        self.optimizer.zero_grad()


def protected(steps: int, sharded_too: bool, warm: bool) -> None:
    """A loop of one's own, over two roles: a model in tensor-parallel parts, and schedules of pipelines."""
    dist.init_process_group("gloo")
    job, rank = session.current(), dist.get_rank()
    point = job.point if job is not None else lambda name: None
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(6)
    parts = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    models = nn.ModuleList([parts])
    if sharded_too:
        from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard as as_others_have_it

        models.append(as_others_have_it(Block(), mesh=mesh))

    def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        point("gradients")
        return (y - target).square().mean()

    schedules: list[Any] = []
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        many = 2 if schedule is ScheduleInterleaved1F1B else 1
        blocks = [Counted() for _ in range(2 * many)]
        mine = [rank + 2 * i for i in range(many)]
        models.extend(blocks[i] for i in mine)
        stages = [PipelineStage(blocks[i], i, 2 * many, torch.device("cpu")) for i in mine]
        schedules.append(schedule(stages if many > 1 else stages[0], 4, loss_fn=loss_of))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(models.parameters(), lr=0.01)

    def passes(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = parts(numbers(4, 8, seed=step)).square().mean()
        point("forward")
        loss.backward()
        losses: list[torch.Tensor] = [loss]
        for run in schedules:
            if rank:
                run.step(target=numbers(8, 8, seed=step + 50), losses=(told := []))
                losses += told
            else:
                run.step(numbers(8, 8, seed=step))
        return torch.stack([each.detach() for each in losses]).sum()

    def one(step: int) -> float:
        total = passes(step)
        if job is not None:
            job.commit_wait()
        dist.all_reduce(total)
        if job is not None:
            job.optimizer_begins()
        optimizer.step()
        return total.item()

    def loop() -> None:
        while job.version < steps:
            told = f"step {job.version + 1} loss {one(job.version)!r}"
            job.exchanged()
            print(told, flush=True)
            job.step_done()

    if warm:
        passes(99)
    if job is not None:
        job.protect(Alone(models, optimizer), loop, version=0)
    else:
        for step in range(steps):
            print(f"step {step + 1} loss {one(step)!r}", flush=True)
    state = [t.to_local() if isinstance(t, DTensor) else t for t in models.state_dict().values()]
    whole = b"".join(t.detach().numpy().tobytes() for t in state)
    print(f"rank {rank} ends with {hashlib.sha256(whole).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    protected(int(sys.argv[1]), "sharded" in sys.argv, "warm" in sys.argv)
