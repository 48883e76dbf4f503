"""mode=generate and mode=chat: answers streamed to the terminal, with a footer of tau and speed."""

from __future__ import annotations

from dataclasses import asdict
from time import perf_counter

from rich.console import Console
from rich.text import Text

from drafters.config import LOSSY_RULES, ServeRun
from drafters.errors import ConfigError
from drafters.target import Target
from runtime.discover import choose_drafter
from runtime.engine import Engine
from runtime.request import Result
from runtime.sampling import SamplingParams

Message = dict[str, str]
LEAVE = "/exit"


def generate_once(cfg: ServeRun, console: Console) -> Result:
    """serve.py mode=generate: answers cfg.prompt as one user turn."""
    if not cfg.prompt:
        raise ConfigError('mode=generate needs a prompt, but prompt is empty. Set prompt="...".')
    _, result = _answer(_open(cfg), [{"role": "user", "content": cfg.prompt}], _params(cfg), console)
    if result is None:
        raise KeyboardInterrupt
    return result


def chat(cfg: ServeRun, console: Console) -> None:
    """serve.py mode=chat: a conversation until Ctrl-D or /exit; Ctrl-C stops the answer that is being written."""
    engine = _open(cfg)
    greeting = f"chat with {engine.target.title}: Ctrl-C stops an answer, Ctrl-D or {LEAVE} leaves"
    console.print(Text(greeting, style="dim"), soft_wrap=True)
    messages: list[Message] = []
    while (words := _ask(console)) is not None:
        if not words:
            continue
        messages.append({"role": "user", "content": words})
        try:
            text, _ = _answer(engine, messages, _params(cfg), console)
        except ConfigError as error:
            # Only the length can be at fault here; without the old turns the next question fits again.
            console.print(Text(f"{error} A new conversation begins.", style="red"), soft_wrap=True)
            messages = []
            continue
        if text:
            messages.append({"role": "assistant", "content": text})
        else:
            messages.pop()


def footer(result: Result, seconds: float, params: SamplingParams) -> str:
    """One line: tau, tokens/s from the prompt's ids to the last token, rounds, tokens, why it ended, and if lossy."""
    stats, tokens = result.stats, len(result.token_ids)
    line = (
        f"tau {stats.acceptance_length:.2f} | {tokens / seconds:.1f} tokens/s | {stats.rounds} rounds | "
        f"{tokens} tokens | {result.finish_reason}"
    )
    return f"{line} | LOSSY: verification={params.verification}" if params.verification in LOSSY_RULES else line


def _open(cfg: ServeRun) -> Engine:
    target = Target.load(cfg.target)
    return Engine.load(target, choose_drafter(cfg.drafter.path, target), **asdict(cfg.runtime))


def _params(cfg: ServeRun) -> SamplingParams:
    return SamplingParams(cfg.eval.max_new_tokens, **asdict(cfg.sampling), verification=cfg.verification)


def _ask(console: Console) -> str | None:
    """The user's next words; None to leave."""
    try:
        words = console.input("[bold]you>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if words == LEAVE else words


def _answer(
    engine: Engine, messages: list[Message], params: SamplingParams, console: Console
) -> tuple[str, Result | None]:
    """Streams one answer; returns its text and its Result, or what was shown and None where Ctrl-C stopped it."""
    shown = ""
    result = None
    start = perf_counter()
    stream = engine.stream(messages, params)
    try:
        for piece in stream:
            if isinstance(piece, Result):
                result = piece
            else:
                shown += piece
                _print(piece, console)
    except KeyboardInterrupt:
        stream.close()
    seconds = perf_counter() - start
    console.print()
    console.print(Text("stopped" if result is None else footer(result, seconds, params), style="dim"), soft_wrap=True)
    return shown if result is None else result.text, result


def _print(piece: str, console: Console) -> None:
    console.print(Text(piece), end="", soft_wrap=True)
