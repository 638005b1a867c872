"""Row "zero": DeepSpeed's ZeRO 1 to 3 with two roles on the one device, and a worker is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.gpu import launched
from benchmarks.gpu.checks import NotThereError, Row, main
from benchmarks.gpu.nccl import for_one_device

RECIPES = ROOT / "recipes" / "deepspeed"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --dropout 0 --mock-data".split()
)
STEPS = 20
WORLD = 2


def body(row: Row) -> None:
    """All checks of the row."""
    backend = for_one_device(row.device) if row.walks else ""
    for stage in (1, 2, 3) if row.device != "cpu" else (2,):
        check = f"ZeRO {stage}, one worker killed"
        row.on_device(check, lambda s=stage, c=check: _recovered(row, s, c, backend))  # type: ignore[misc]


def _recovered(row: Row, stage: int, check: str, backend: str) -> None:
    for needed in ("deepspeed", "transformers"):
        if importlib.util.find_spec(needed) is None:
            raise NotThereError(f"{needed} is not installed")
    if row.device == "cuda" and backend != "nccl":
        raise NotThereError(
            "ZeRO scatters what is on a device, which gloo cannot, and NCCL opens no two ranks"
        )
    config = json.loads((RECIPES / f"ds_zero{stage}.json").read_text())
    section = config.pop("fault_tolerance") | {"spares": 0}
    with tempfile.TemporaryDirectory(prefix="ft-gpu-zero-") as scratch:
        plain, protected = Path(scratch, "plain.json"), Path(scratch, "protected.json")
        plain.write_text(json.dumps(config))
        protected.write_text(json.dumps(config | {"fault_tolerance": section}))
        hosted = str(ROOT / "benchmarks" / "gpu" / "hosted.py")
        flags = [hosted, str(RECIPES / "pretrain_clm.py"), *MODEL, f"--train-iters={STEPS}"]
        env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHDYNAMO_DISABLE": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(RECIPES), os.environ.get("PYTHONPATH", str(ROOT))])
        if row.device == "cpu":
            env["DS_ACCELERATOR"] = "cpu"
        launched.recovered(
            row,
            check,
            Path(scratch),
            WORLD,
            [*flags, f"--deepspeed_config={plain}"],
            [*flags, f"--deepspeed_config={protected}"],
            env,
        )


if __name__ == "__main__":
    main("zero", body)
