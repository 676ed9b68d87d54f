"""`python fake_core_process.py TOKENIZER_DIR [PORT]`: a core over the fake executor as a process, to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from frontend_support import CoreOptions, GrpcCore

from core_svc.fake_executor import FakeOptions
from pagewire.runtime.ready import print_ready


async def main(directory: str, port: int) -> None:
    files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    options = CoreOptions(options=FakeOptions(latency_s=0.02), heartbeat_interval_ms=1000, num_blocks=4000)
    core = GrpcCore(files, options)
    target = await core.start(port)
    print_ready("core", "127.0.0.1", int(target.rpartition(":")[2]), core.info.core_incarnation)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
