"""Byte-level samples for the DeepSpeed recipes, as the Megatron recipe has them.

A token is a byte, and 256 ends a file. The text is read from files on the spot, from the .bin file that
recipes/megatron/prepare_data.py wrote, or made up.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

END_OF_DOCUMENT = 256
VOCABULARY = 257
SUFFIXES = (".py", ".txt", ".md", ".rst")


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Consecutive pieces of `length` tokens; inputs and labels are the same, the model shifts them."""

    def __init__(self, tokens: numpy.ndarray, length: int) -> None:
        """`tokens` is 1-D, of any integer type; what does not fill a sample at its end is left out."""
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        """How many whole samples there are."""
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`, int64 [length]."""
        piece = self.tokens[index * self.length : (index + 1) * self.length]
        ids = torch.from_numpy(piece.astype(numpy.int64))
        return {"input_ids": ids, "labels": ids}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `load` reads."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        nargs="+",
        type=Path,
        default=[Path(sysconfig.get_paths()["stdlib"])],
        help="text files and directories, or one .bin file of uint16 tokens (default: Python's library)",
    )
    group.add_argument("--mock-data", action="store_true", help="made-up samples in place of --data")
    group.add_argument("--max-megabytes", type=float, default=4, help="text to read at most")
    group.add_argument("--train-samples", type=int, help="samples in an epoch (default: all there are)")
    group.add_argument("--valid-samples", type=int, default=64, help="samples held out for validation")
    group.add_argument("--num-workers", type=int, default=0, help="processes per rank that read samples")


def load(args: argparse.Namespace) -> tuple[Samples, Samples]:
    """Samples of `args.seq_length` tokens for training and, from the end of the corpus, for validation."""
    length: int = args.seq_length
    if args.mock_data:
        size = ((args.train_samples or 512) + args.valid_samples) * length
        tokens = numpy.random.default_rng(0).integers(VOCABULARY, size=size, dtype=numpy.uint16)
    elif args.data[0].suffix == ".bin":
        tokens = numpy.fromfile(args.data[0], dtype=numpy.uint16)
    else:
        tokens = read_text(args.data, int(args.max_megabytes * 1e6))
    held_out = args.valid_samples * length
    train = tokens[:-held_out] if held_out else tokens
    if args.train_samples:
        train = train[: args.train_samples * length]
    if len(train) < length:
        raise ValueError(f"{len(tokens)} tokens are too few for {args.valid_samples} validation samples more")
    return Samples(train, length), Samples(tokens[-held_out:] if held_out else tokens[:0], length)


def read_text(paths: list[Path], max_bytes: int) -> numpy.ndarray:
    """The bytes of text files, and of those in directories in the order of their paths, as uint16 tokens."""
    pieces: list[numpy.ndarray] = []
    left = max_bytes
    for path in paths:
        inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
        for file in inside:
            if "site-packages" in file.parts or left <= 0:
                continue
            text = numpy.frombuffer(file.read_bytes()[:left], dtype=numpy.uint8)
            left -= text.size
            if text.size:
                pieces += [text.astype(numpy.uint16), numpy.array([END_OF_DOCUMENT], dtype=numpy.uint16)]
    if not pieces:
        raise ValueError(f"no text found in {', '.join(map(str, paths))}")
    return numpy.concatenate(pieces)


def batches(loader: Any, position: int) -> Iterator[Any]:
    """Micro batches of one of DeepSpeed's loaders from number `position` on, epoch after epoch."""
    epoch, skip = divmod(position, len(loader))
    while True:
        loader.data_sampler.set_epoch(epoch)
        # A DataLoader draws a seed when its iteration begins; in a resumed one, it has done so.
        with torch.random.fork_rng(devices=[], enabled=skip > 0):
            iter(loader)  # returns the loader itself, which begins again each time
            for _ in range(skip):
                next(loader)
        while (batch := next(loader, None)) is not None:
            yield batch
        epoch, skip = epoch + 1, 0
