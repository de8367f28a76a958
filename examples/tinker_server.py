"""Serve a base model with SkyRL's Tinker server, for `train_grpo.py --backend tinker`.

The server needs an environment of its own (docs/how-to/engine.md), but no GPU:

    .venv-engine/bin/python examples/tinker_server.py --model FOLDER --folder runs/engine

SkyRL 0.3.0 can start its engine, a second process that does the computation, only with `uv run`.
Therefore, this file also runs as the engine. The engine exits when the server ends for any reason,
because two engines on one database would race.
"""

import argparse
import os
import sys
import threading
import time
import typing
from pathlib import Path

import typing_extensions

# SkyRL's pydantic models use typing.TypedDict, which pydantic rejects before Python 3.12.
typing.TypedDict = typing_extensions.TypedDict


def serve(options: argparse.Namespace) -> None:
    """Answer requests, and queue their computation for the engine."""
    import uvicorn
    from skyrl.tinker import api  # pyright: ignore[reportMissingImports]
    from skyrl.tinker.config import (  # pyright: ignore[reportMissingImports]
        EngineConfig,
        config_to_argv,
    )

    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = EngineConfig(
        base_model=options.model,
        backend="jax",
        backend_config={
            "max_lora_rank": options.max_lora_rank,
            "max_lora_adapters": 8,
            "train_micro_batch_size": options.micro_batch,
            "sample_max_num_sequences": options.max_num_seqs,
            "tensor_parallel_size": options.tensor_parallel_size,
        },
        checkpoints_base=folder / "checkpoints",
        database_url=f"sqlite:///{folder / 'tinker.db'}",
        external_inference_lora_base=folder / "lora",
    )
    command = [sys.executable, __file__, "compute", *config_to_argv(config)]
    api._build_uv_run_cmd_engine = lambda *_: command
    api.app.state.engine_config = config
    uvicorn.run(api.app, host=options.host, port=options.port)


def compute() -> None:
    """Run the engine, which samples and trains, for as long as the parent process runs."""
    from skyrl.tinker import engine  # pyright: ignore[reportMissingImports]

    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    engine.main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["compute"]:
        del sys.argv[1]
        compute()
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
        parser.add_argument("--model", required=True, help="hub id or folder")
        parser.add_argument(
            "--folder",
            type=Path,
            default=Path("runs/engine"),
            help="folder for the database, the checkpoints and the adapters",
        )
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument("--max-lora-rank", type=int, default=16)
        parser.add_argument(
            "--micro-batch", type=int, default=8, help="sequences per micro-batch in training"
        )
        parser.add_argument("--max-num-seqs", type=int, default=64)
        parser.add_argument(
            "--tensor-parallel-size", type=int, default=1, help="devices that share the base model"
        )
        serve(parser.parse_args())
