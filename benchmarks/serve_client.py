"""The client of benchmarks/serve.py: a light process (standard library only) that keeps many requests under way.

Reads one JSON object from standard input: port, concurrency, path, headers, and jobs (bodies of requests); writes one
to standard output. What is received is only stamped with its time; it is read when the last answer is in.

    {"answers": [{"status", "parts": [[seconds, text], ...], "begin", "end"}], "wall_s", "cpu_s"}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

LINES = 1 << 24


async def main() -> None:
    given = json.loads(sys.stdin.read())
    queue = list(enumerate(given["jobs"]))[::-1]
    answers: list[Any] = [None] * len(queue)
    begin, cpu = time.perf_counter(), time.process_time()
    workers = [work(given, queue, answers, begin) for _ in range(min(given["concurrency"], len(queue)))]
    await asyncio.gather(*workers)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    for answer in answers:
        answer["parts"] = [[at, part.decode()] for at, part in answer["parts"]]
    json.dump({"answers": answers, "wall_s": wall_s, "cpu_s": cpu_s}, sys.stdout)


async def work(given: dict[str, Any], queue: list[Any], answers: list[Any], begin: float) -> None:
    """One connection, which is kept: request after request while there are any."""
    reader, writer = await asyncio.open_connection("127.0.0.1", given["port"], limit=LINES)
    while queue:
        number, body = queue.pop()
        data = json.dumps(body).encode()
        head = f"POST {given['path']} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = {"begin": time.perf_counter() - begin, "parts": []}
        answers[number] = answer
        async for part in receive(reader, answer):
            answer["parts"].append((time.perf_counter() - begin, part))
        answer["end"] = time.perf_counter() - begin
    writer.close()
    await writer.wait_closed()


async def receive(reader: asyncio.StreamReader, answer: dict[str, Any]) -> Any:
    """The parts of a body as they arrive, chunked or of a length that is told."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    answer["status"] = int(head.split(" ", 2)[1])
    if "transfer-encoding: chunked" not in head:
        length = head.partition("content-length: ")[2].partition("\r\n")[0]
        yield await reader.readexactly(int(length))
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


if __name__ == "__main__":
    asyncio.run(main())
