"""Does training converge the same while replica groups are away? FT-HSDP, section 6.2, in small.

A small byte-level GPT is trained on the sources of Python's standard library by eight data-parallel replica
groups, some of which leave for a stretch. The groups are simulated in one process: the mean of the gradients
of the groups that took part is the gradient of the batch that they trained together. Which samples those are,
and what the LR is multiplied by, comes from the engine's own rules (`ft_core.elastic.rules`). Settings share
their initial weights, the order of the samples and, up to the moment the groups leave, the run itself.

A sample's loss is noted when it is trained. So a setting is compared with the baseline on the same samples
at the same progress: neither the text's difficulty nor the noisier mean of a smaller batch counts as
fluctuation. The setting that misses one group for one step shows how far runs drift apart by chance.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import ROOT, finish, parser, table
from ft_core.elastic.rules import Deal, Membership, lr_factor, positions

FIGURE = ROOT / "docs" / "convergence.svg"
END_OF_DOCUMENT = 256
VOCABULARY = 257
HELD_OUT = 20
"""Every 20th file is validation text."""


@dataclass(frozen=True)
class Setting:
    """Replica groups that are away for a stretch of the run, and what the LR does meanwhile."""

    name: str
    away: int = 0
    until: float = 0.0
    """When they come back, as a share of all samples."""
    intervention: str = "none"


BASELINE = "baseline"
CONTROL = "1 away, one step"
LEAVE, SHORT, LONG = 0.3, 0.5, 0.8
"""When groups leave, and when they come back after a short or a long absence: shares of all samples."""
SETTINGS = (
    Setting(CONTROL, 1),
    Setting("1 away, none", 1, SHORT, "none"),
    Setting("1 away, sqrt", 1, SHORT, "sqrt"),
    Setting("3 away, none", 3, SHORT, "none"),
    Setting("3 away, sqrt", 3, SHORT, "sqrt"),
    Setting("3 away long, none", 3, LONG, "none"),
    Setting("3 away long, sqrt", 3, LONG, "sqrt"),
)
STRETCHES = ((LEAVE, SHORT), (SHORT, LONG), (LONG, 1.0))


@dataclass(frozen=True)
class Size:
    """Model, data and schedule of all runs."""

    groups: int = 8
    turn: int = 1
    """Samples of a group in a step."""
    steps: int = 1500
    """Of the baseline; the others take more steps for the same samples."""
    sequence: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 2
    peak_lr: float = 3e-3
    warm_up: float = 0.05
    """Share of the samples over which the LR rises; then it falls as a cosine to a tenth."""
    validation: int = 256
    """Sequences."""
    bins: int = 60
    """Points of a curve of the training loss."""
    validations: int = 20
    """Over the run; the last is at its end."""
    seeds: int = 5

    @property
    def samples(self) -> int:
        """All that a run trains."""
        return self.steps * self.groups * self.turn

    def lr(self, seen: int) -> float:
        """The LR after `seen` samples, with all groups there."""
        share = seen / self.samples
        if share < self.warm_up:
            return self.peak_lr * share / self.warm_up
        along = (min(share, 1.0) - self.warm_up) / (1 - self.warm_up)
        return self.peak_lr * (0.55 + 0.45 * math.cos(math.pi * along))


QUICK = Size(steps=100, sequence=16, width=16, heads=2, layers=1, validation=16, bins=20, seeds=2)


class Block(nn.Module):
    """A transformer layer: causal attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d = size.width
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)])
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, sequence, width] to the same."""
        b, t, d = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, d // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Byte-level GPT with tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * size.layers) if residual else 1))

    def losses(self, text: torch.Tensor) -> torch.Tensor:
        """[samples, sequence + 1] tokens to [samples] mean losses, in nats per byte."""
        x = self.blocks(self.tokens(text[:, :-1]) + self.places.weight)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(1)


class Run:
    """A training run that can be copied at any step and go on otherwise."""

    def __init__(self, size: Size, seed: int, train: torch.Tensor, validation: torch.Tensor) -> None:
        torch.manual_seed(seed)
        self.size, self.validation = size, validation
        # A run may end in the middle of a step, so there is text for one more.
        self.train = train[torch.randperm(len(train))[: size.samples + size.groups * size.turn]]
        self.model = GPT(size)
        self.adam = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.95), fused=True)
        self.membership, self.deal = Membership(size.groups), Deal(size.turn)
        self.step = self.seen = 0
        self.loss_of = torch.full((len(self.train),), math.nan)
        """By position: a sample's loss when it was trained."""
        self.validated: list[float] = []

    def copied(self) -> Run:
        """The same state; shares the data."""
        shared = {id(x): x for x in (self.size, self.train, self.validation)}
        return copy.deepcopy(self, shared)

    def go_on(self, share: float, away: int = 0, intervention: str = "none") -> None:
        """Train without the last `away` groups until `share` of all samples is seen; at least one step."""
        self.membership = self.membership.changed(self.step, range(self.size.groups - away))
        while True:
            self._train_step(intervention)
            if self.seen >= share * self.size.samples:
                return

    def curve(self) -> torch.Tensor:
        """[bins] means of the training loss over the same samples in each run."""
        each = self.loss_of[: self.size.samples]
        if each.isnan().any() or self.seen != int((~self.loss_of.isnan()).sum()):
            raise AssertionError("not every sample was trained exactly once")
        return torch.stack([part.mean() for part in each.tensor_split(self.size.bins)])

    def _train_step(self, intervention: str) -> None:
        size = self.size
        self.step += 1
        self.deal.take(self.step, self.membership)
        trained = self.deal.step_done(self.step, self.membership)
        batch = torch.tensor([at for ranges in trained.values() for at in positions(ranges)])
        losses = self.model.losses(self.train[batch])
        self.adam.zero_grad()
        losses.mean().backward()
        self.seen += len(batch)
        lr = size.lr(self.seen) * lr_factor(intervention, len(trained), size.groups)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        self.loss_of[batch] = losses.detach()
        if self.seen * size.validations >= (len(self.validated) + 1) * size.samples:
            self.validated.append(self._validate())

    @torch.no_grad()
    def _validate(self) -> float:
        return float(torch.cat([self.model.losses(part) for part in self.validation.split(64)]).mean())


def main() -> None:
    """Train all settings with all seeds, compare, print; with --save draw the figure too."""
    p = parser(__doc__)
    p.add_argument("--seeds", type=int, default=Size.seeds, help="repetitions")
    p.add_argument("--peak-lr", type=float, default=Size.peak_lr, help="the findings depend on it")
    args = p.parse_args()
    size = QUICK if args.quick else Size()
    size = replace(
        size, seeds=min(args.seeds, size.seeds) if args.quick else args.seeds, peak_lr=args.peak_lr
    )
    torch.set_num_threads(1)
    train, validation = text(size)
    runs = [seed_runs(size, seed, train, validation) for seed in range(size.seeds)]
    result = compare(size, runs)
    finish("convergence", args, result, report(result))
    if args.save:
        try:
            draw(result, FIGURE)
        except ModuleNotFoundError as error:
            print(f"no figure: {error}; pip install -e '.[figures]'", file=sys.stderr)


def text(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences to train and to validate with: [number, sequence + 1] tokens each, of different files."""
    sources = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in sources.rglob("*.py") if "site-packages" not in p.parts)
    parts: tuple[list[numpy.ndarray], list[numpy.ndarray]] = ([], [])
    for number, path in enumerate(files):
        ids = numpy.frombuffer(path.read_bytes(), dtype=numpy.uint8).astype(numpy.int64)
        parts[number % HELD_OUT == 0].append(numpy.append(ids, END_OF_DOCUMENT))
    train, validation = (_sequences(numpy.concatenate(part), size.sequence + 1) for part in parts)
    chosen = torch.randperm(len(validation), generator=torch.Generator().manual_seed(0))
    return train, validation[chosen[: size.validation]]


def _sequences(tokens: numpy.ndarray, length: int) -> torch.Tensor:
    return torch.from_numpy(tokens[: len(tokens) // length * length].reshape(-1, length))


def seed_runs(size: Size, seed: int, train: torch.Tensor, validation: torch.Tensor) -> dict[str, Run]:
    """The finished runs of one seed, by setting."""
    baseline = Run(size, seed, train, validation)
    baseline.go_on(LEAVE)
    runs = {BASELINE: baseline}
    for setting in SETTINGS:
        runs[setting.name] = run = baseline.copied()
        run.go_on(setting.until, setting.away, setting.intervention)
    for name, run in runs.items():
        run.go_on(1.0)
        print(f"seed {seed}, {name}: {run.step} steps, validation {run.validated[-1]:.4f}", file=sys.stderr)
    return runs


def compare(size: Size, runs: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Figures by setting: means and standard deviations over seeds, and curves averaged over seeds.

    Losses are in nats per byte. A run's deviation is its training loss minus its seed's baseline on the same
    samples, bin by bin; `absolute` is the mean of its absolute values.
    """
    baseline = torch.stack([by_name[BASELINE].curve() for by_name in runs])
    base_final = [by_name[BASELINE].validated[-1] for by_name in runs]
    found: dict[str, Any] = {}
    for setting in (Setting(BASELINE), *SETTINGS):
        mine = [by_name[setting.name] for by_name in runs]
        final = [run.validated[-1] for run in mine]
        off = torch.stack([run.curve() for run in mine]) - baseline
        parts = {s: off[:, round(s[0] * size.bins) : round(s[1] * size.bins)] for s in STRETCHES}
        found[setting.name] = {
            "setting": asdict(setting),
            "steps": mine[0].step,
            "final": _over_seeds(final),
            "final_minus_baseline": _over_seeds([a - b for a, b in zip(final, base_final, strict=True)]),
            "deviation": {_percent(s): _over_seeds(part.mean(1).tolist()) for s, part in parts.items()},
            "absolute": {_percent(s): _over_seeds(part.abs().mean(1).tolist()) for s, part in parts.items()},
            "validation_curve": _mean_curve([run.validated for run in mine]),
            "deviation_curve": _mean_curve(off.tolist()),
        }
    parameters = sum(p.numel() for p in runs[0][BASELINE].model.parameters())
    return {"size": asdict(size), "samples": size.samples, "parameters": parameters, "settings": found}


def _percent(stretch: tuple[float, float]) -> str:
    return "{:.0f}-{:.0f} %".format(*(100 * share for share in stretch))


def _over_seeds(values: Sequence[float]) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": round(statistics.fmean(values), 5),
        "std": round(std, 5),
        "values": [round(v, 5) for v in values],
    }


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.fmean(points), 5) for points in zip(*curves, strict=True)]


def report(result: dict[str, Any]) -> str:
    """Two tables: the ends of the runs, and the deviations by stretch of the run."""
    ends, ways = [], []
    for name, found in result["settings"].items():
        beside = "" if name == BASELINE else _plus_minus(found["final_minus_baseline"])
        ends.append([name, found["steps"], "{mean:.4f} ±{std:.4f}".format(**found["final"]), beside])
        if name != BASELINE:
            both = [found[kind][_percent(s)] for kind in ("deviation", "absolute") for s in STRETCHES]
            ways.append([name, *map(_plus_minus, both)])
    header = [f"{sign} {_percent(s)}" for sign in ("Δ", "|Δ|") for s in STRETCHES]
    size = result["size"]
    return "\n".join(
        [
            f"{result['parameters']} parameters, {result['samples']} samples of {size['sequence']} bytes, "
            f"{size['seeds']} seeds: mean ±standard deviation over seeds",
            "",
            table(["validation loss, nats per byte", "steps", "at the end", "- baseline, /1000"], ends),
            "",
            "Δ: training loss - baseline's on the same samples, /1000, by stretch of the run:",
            table(["", *header], ways),
        ]
    )


def _plus_minus(of: Mapping[str, float]) -> str:
    return f"{1000 * of['mean']:+.1f} ±{1000 * of['std']:.1f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """The figure: the whole run, and the deviations around a short and a long absence.

    ModuleNotFoundError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "convergence", "font.size": 10, "axes.grid": True})
    matplotlib.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    settings, size = result["settings"], result["size"]
    figure, axes = pyplot.subplot_mosaic(
        [["all", "short"], ["all", "long"]], figsize=(11, 5.6), layout="constrained"
    )
    for name, found in settings.items():
        curve = found["validation_curve"]
        at = [100 * (i + 1) / len(curve) for i in range(len(curve))]
        axes["all"].plot(at, curve, label=name, **_look(found["setting"]))
    axes["all"].set(ylabel="validation loss, nats per byte", xlabel="samples seen, %", title="whole run")
    for place, until in (("short", SHORT), ("long", LONG)):
        ax = axes[place]
        ax.axvspan(100 * LEAVE, 100 * until, color="0.93", zorder=0)
        ax.axhline(0, color="black", linewidth=1.2)
        for name, found in settings.items():
            if found["setting"]["until"] == until or name == CONTROL:
                points = [1000 * d for d in found["deviation_curve"]]
                at = [100 * (i + 0.5) / len(points) for i in range(len(points))]
                ax.plot(at, points, **_look(found["setting"]))
        ax.set(xlim=(20, 100), ylabel="training loss - baseline, /1000")
        ax.set_title(f"groups away from {100 * LEAVE:.0f} to {100 * until:.0f} % (grey)")
    axes["long"].set_xlabel("samples seen, %")
    axes["all"].legend(frameon=False)
    figure.suptitle(f"{size['groups']} replica groups, mean of {size['seeds']} seeds", fontsize=11)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _look(setting: Mapping[str, Any]) -> dict[str, Any]:
    if not setting["until"]:
        color = "0.55" if setting["away"] else "black"
        return {"color": color, "linewidth": 1.2}
    color = {"none": "#d95f02", "sqrt": "#1b7fbd"}[setting["intervention"]]
    style = "--" if setting["away"] == 1 else ":" if setting["until"] == LONG else "-"
    return {"color": color, "linewidth": 1.6, "linestyle": style}


if __name__ == "__main__":
    main()
