"""Turn text files into the dataset that pretrain_gpt_core.py trains on.

Tokens are bytes, a document is a file and ends with token 256. The result is Megatron's IndexedDataset,
PREFIX.bin and PREFIX.idx; the same input gives the same bytes. Without input it takes the sources of Python's
standard library, so it needs no download:

    python recipes/megatron/prepare_data.py --output-prefix runs/data/stdlib
"""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401  (before megatron, which keeps references to torch.cuda)

# isort: on
import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

END_OF_DOCUMENT = 256
DTYPE = numpy.uint16


def find_files(inputs: list[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    """The files among `inputs`, and those in its directories that have one of `suffixes`, sorted by path."""
    for path in inputs:
        if path.is_dir():
            found = (p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
            yield from sorted(p for p in found if "site-packages" not in p.parts)
        else:
            yield path


def write_dataset(files: Iterator[Path], prefix: Path, max_bytes: int) -> tuple[int, int]:
    """Write `files` in order until they hold `max_bytes`; returns the numbers of documents and tokens.

    The file that passes the limit is cut there. Empty files are left out. ValueError when nothing is left.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DTYPE)
    documents = tokens = 0
    for path in files:
        text = path.read_bytes()[: max_bytes - (tokens - documents)]
        if not text:
            continue
        ids = numpy.append(numpy.frombuffer(text, dtype=numpy.uint8).astype(DTYPE), DTYPE(END_OF_DOCUMENT))
        builder.add_document(ids, [ids.size])
        documents += 1
        tokens += ids.size
        if tokens - documents >= max_bytes:
            break
    if not documents:
        raise ValueError("no text found in the input")
    builder.finalize(get_idx_path(str(prefix)))
    return documents, tokens


def main() -> None:
    """Prepare a dataset as the command line says."""
    parser = argparse.ArgumentParser(description="Turn text files into a byte-level Megatron dataset.")
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        default=[Path(sysconfig.get_paths()["stdlib"])],
        help="text files and directories (default: Python's standard library)",
    )
    parser.add_argument(
        "--suffix", nargs="+", default=[".py", ".txt", ".md", ".rst"], help="files to take from directories"
    )
    parser.add_argument("--output-prefix", type=Path, required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--max-megabytes", type=float, default=4, help="text to read at most")
    args = parser.parse_args()
    missing = [str(path) for path in args.input if not path.exists()]
    if missing:
        parser.error(f"no such input: {', '.join(missing)}")
    files = find_files(args.input, tuple(args.suffix))
    try:
        documents, tokens = write_dataset(files, args.output_prefix, int(args.max_megabytes * 1e6))
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.output_prefix}: {documents} documents, {tokens} tokens")


if __name__ == "__main__":
    main()
