"""What several tests of reports read: copies of real run folders, logs, and a made-up run on GPUs with its plan."""

import json
import shutil
from pathlib import Path

from superpod.common.json_files import append_line, write_json
from superpod.planner import hardware, models, plans, predict
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.runtime.runs.run_folder import RunFolder

RUNS = Path(__file__).parent / "report_runs"
KILLED_TWICE = "tiny_llama3/20261123T071400Z-90bd23"
ON_SLURM = "tiny_llama3_fp32/20261123T071212Z-3df4ca"
MEGATRON, BRIDGE = RUNS / "megatron_lm_written_by_hand.log", RUNS / "megatron_bridge_written_by_hand.log"
NEMO, NEMO_EVENTS = RUNS / "nemo_of_a_real_run.log", RUNS / "nemo_tb_logs"


def copied(name: str, folder: Path) -> RunFolder:
    """A real run, where a report may draw into its folder."""
    path = folder / "runs" / name
    shutil.copytree(RUNS / name, path)
    return RunFolder.open(path)


def lines_of(run: RunFolder) -> list[dict]:
    """metrics.jsonl, read without the code that is tested."""
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def job() -> PlannedJob:
    """Llama 3 8B on 16 H100, in two pipeline stages."""
    return PlannedJob(
        model=models.find("llama3_8b"), node=hardware.node("h100"), fabric=hardware.builtin().fabric_of(
            hardware.node("h100")
        ), gpus=16, seq=8192, precision="bf16", layout=Layout(pp=2, mbs=1, gbs=128),
    )  # fmt: skip


def made_up(folder: Path, slower: float = 1.2, steps: int = 20) -> RunFolder:
    """A run folder of that job as one on GPUs would leave it, `slower` than its plan; no such run was made."""
    facts = {"nodes": 2, "gpus_per_node": 8}
    run = RunFolder.create(folder / "runs", "llama3_8b_pretrain_h100_bf16", facts=facts, recipe_lines=[])
    planned = job()
    run.write_plan(plans.describe_run(planned))
    attempt = run.new_attempt()
    began, seconds = 1000.0, (predict.one(planned).step_time_s or 0.0) * slower
    for step in range(1, steps + 1):
        rate = planned.tokens / seconds / planned.gpus
        line = {
            "t": began + 60 + step * seconds,
            "attempt": attempt.name,
            "step": step,
            "loss": 12.0 / step,
        }
        speed = {"step_time_s": seconds, "tokens": step * planned.tokens, "tokens_per_s_per_gpu": rate}
        append_line(run.path / "metrics.jsonl", {**line, **speed, "val_loss": None, "allocated_gib": 40.0})
    for rank, gib in enumerate([52.0] * 8 + [47.0] * 8):
        beat = {"t": began, "step": steps, "phase": "done", "host": f"n{rank // 8}", "allocated_gib": gib}
        append_line(attempt.path / "heartbeat" / f"{rank}.jsonl", beat)
    write_json(run.path / "done", {"step": steps})
    attempt.finish("done", exit_code=0, started=began)
    write_json(attempt.path / "result.json", attempt.result | {"ended": began + 60 + steps * seconds + 10})
    return run


def known(value: float | None) -> float:
    """A figure that must be known."""
    assert value is not None
    return value
