"""Chats through the package openai, in its own environment: `openai_calls.py URL NUM CONCURRENCY PROMPT_LEN OUTPUT_LEN`.

Prints one JSON line: mean times by the clock beside `async for`, as a program that shows an answer as it comes sees them.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time

import openai

WORDS = ("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school", "state", "family", "group")


async def chat(client: openai.AsyncOpenAI, model: str, number: int, prompt_len: int, output_len: int) -> tuple[float, float]:
    """TTFT and TPOT, s, of one. Raises RuntimeError for an answer of another length."""
    text = " ".join(random.Random(number).choices(WORDS, k=prompt_len))  # about a token a word
    sent = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_completion_tokens=output_len, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    times, counted = [], 0
    async for chunk in stream:
        if chunk.choices:
            times.append(time.perf_counter())
        if chunk.usage is not None:
            counted = chunk.usage.completion_tokens
    if counted != output_len:
        raise RuntimeError(f"request {number} has {counted} tokens instead of {output_len}")
    return times[0] - sent, (times[-1] - times[0]) / (counted - 1)


async def main(url: str, num: int, concurrency: int, prompt_len: int, output_len: int) -> None:
    free = asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def one(number: int) -> tuple[float, float]:
            async with free:
                return await chat(client, model, number, prompt_len, output_len)

        times = await asyncio.gather(*map(one, range(num)))
    print(
        json.dumps({"num": num, "ttft": statistics.fmean(t[0] for t in times), "tpot": statistics.fmean(t[1] for t in times)})
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
