"""One-shot answers and chat: what is shown, what is remembered, how it ends."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from drafters.config import EvalConfig, RuntimeConfig, SamplingConfig, ServedDrafter, ServeRun, TargetConfig
from drafters.errors import ConfigError
from runtime import Engine, SamplingParams, terminal
from runtime.metrics import Stats
from runtime.request import Result

NEW = 12
TARGET = SimpleNamespace(title="tiny tuned by adapter 0123")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def cfg(tiny_folder):
    return ServeRun(
        target=TargetConfig(name="tiny", path=str(tiny_folder), dtype="float32", device="cpu"),
        drafter=ServedDrafter("ngram"),
        runtime=RuntimeConfig(num_draft_tokens=16),
        eval=EvalConfig(max_new_tokens=NEW),
        sampling=SamplingConfig(0.8, seed=3),
        mode="generate",
        prompt="hello",
        output_dir="unused",
    )


@pytest.fixture
def same_target(tiny_target, monkeypatch):
    monkeypatch.setattr(terminal.Target, "load", lambda cfg: tiny_target)


@pytest.fixture
def console():
    return Console(record=True, width=40)


@pytest.fixture
def typed(console, monkeypatch):
    """Answers the chat's questions in turn; an exception is raised instead."""

    def fill(*lines):
        waiting = iter([*lines, EOFError()])

        def answer(*_, **__):
            line = next(waiting)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(console, "input", answer)

    return fill


@pytest.fixture
def heard(monkeypatch):
    """Replaces the engine by one that says 'answer N' and records what it is asked."""
    asked: list[list[dict[str, str]]] = []

    class Heard:
        target = TARGET

        def stream(self, messages, params):
            asked.append([dict(message) for message in messages])
            yield from ("answer ", str(len(asked)))
            yield Result([1], [2, 3], f"answer {len(asked)}", "stop", Stats(1, 1, 0, 1))

    monkeypatch.setattr(terminal, "_open", lambda cfg: Heard())
    return asked


def test_generate_streams_the_engines_text(cfg, console, same_target, tiny_target):
    expected = Engine.load(tiny_target, "none").generate(["hello"], SamplingParams(NEW, 0.8, 3))[0]
    result = terminal.generate_once(cfg, console)
    assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
    text = console.export_text()
    assert text.startswith(expected.text[:5]) and text.count("tau") == 1
    line = text.splitlines()[-1]
    assert re.fullmatch(
        rf"tau {result.stats.acceptance_length:.2f} \| [\d.]+ tokens/s \| {result.stats.rounds} rounds \| "
        rf"{len(result.token_ids)} tokens \| {result.finish_reason}",
        line,
    )


def test_pieces_are_shown_as_they_are_without_markup_or_breaks(cfg, console, monkeypatch):
    class Says:
        def stream(self, messages, params):
            yield from ("[bold]x[/bold] ", "word " * 20, "\nnext")
            yield Result([1], [2, 3], "unused", "stop", Stats(1, 1, 0, 1))

    monkeypatch.setattr(terminal, "_open", lambda cfg: Says())
    terminal.generate_once(cfg, console)
    assert console.export_text().startswith("[bold]x[/bold] " + "word " * 20 + "\nnext\ntau")


def test_footer_divides_by_the_seconds():
    result = Result([1], list(range(30)), "", "length", Stats(rounds=12, drafted=60, accepted=17, emitted=29))
    line = "tau 2.42 | 15.0 tokens/s | 12 rounds | 30 tokens | length"
    assert terminal.footer(result, 2.0, SamplingParams()) == line
    lossy = SamplingParams(verification="typical")
    assert terminal.footer(result, 2.0, lossy) == line + " | LOSSY: verification=typical"


def test_generate_needs_a_prompt(cfg, console):
    cfg.prompt = None
    with pytest.raises(ConfigError, match="mode=generate needs a prompt"):
        terminal.generate_once(cfg, console)


def test_chat_remembers_the_turns(cfg, console, typed, heard):
    typed("one", "", "two")
    terminal.chat(cfg, console)
    said = {"role": "assistant", "content": "answer 1"}
    assert heard == [[user("one")], [user("one"), said, user("two")]]
    shown = console.export_text()
    assert shown.count("tau 1.00") == 2 and "chat with tiny tuned by adapter 0123:" in shown


@pytest.mark.parametrize("way", ["/exit", EOFError(), KeyboardInterrupt()])
def test_chat_ends(cfg, console, typed, heard, way):
    typed("one", way, "never read")
    terminal.chat(cfg, console)
    assert len(heard) == 1


def test_chat_runs_on_a_real_engine(cfg, console, typed, same_target, tiny_target):
    typed("hello", "again")
    terminal.chat(cfg, console)
    params = SamplingParams(NEW, 0.8, 3)
    engine = Engine.load(tiny_target, "none")
    first = engine.generate([[user("hello")]], params)[0].text
    second = engine.generate([[user("hello"), {"role": "assistant", "content": first}, user("again")]], params)[0].text
    shown = console.export_text()
    assert first and second and shown.index(first) < shown.rindex(second)


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(cfg, console, typed, monkeypatch):
    asked = []

    class Stopped:
        target = TARGET

        def stream(self, messages, params):
            asked.append(list(messages))
            yield "half an "
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "_open", lambda cfg: Stopped())
    typed("one", "two")
    terminal.chat(cfg, console)
    assert asked[1] == [user("one"), {"role": "assistant", "content": "half an "}, user("two")]
    assert console.export_text().count("stopped") == 2


def test_an_answer_stopped_before_its_first_word_is_forgotten(cfg, console, typed, monkeypatch):
    asked = []

    class Stopped:
        target = TARGET

        def stream(self, messages, params):
            asked.append(list(messages))
            raise KeyboardInterrupt
            yield

    monkeypatch.setattr(terminal, "_open", lambda cfg: Stopped())
    typed("one", "two")
    terminal.chat(cfg, console)
    assert asked == [[user("one")], [user("two")]]
    with pytest.raises(KeyboardInterrupt):
        terminal.generate_once(cfg, console)


def test_ctrl_c_while_showing_leaves_the_engine_free(cfg, console, tiny_target, monkeypatch):
    engine = Engine.load(tiny_target, "ngram")
    shown = []

    def interrupt(piece, console):
        shown.append(piece)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "_print", interrupt)
        text, result = terminal._answer(engine, [user("hello")], SamplingParams(NEW), console)
    assert (text, result) == (shown[0], None)
    text, result = terminal._answer(engine, [user("hello")], SamplingParams(NEW), console)
    assert text == result.text


def test_a_conversation_past_the_limit_starts_anew(cfg, console, typed, same_target):
    cfg.runtime = RuntimeConfig(num_draft_tokens=16, max_length=70)
    typed("hello", "and a rather longer question", "hello")
    terminal.chat(cfg, console)
    shown = " ".join(console.export_text().split())
    assert "over the limit of 70" in shown and "A new conversation begins." in shown
    assert shown.count("rounds") == 2
