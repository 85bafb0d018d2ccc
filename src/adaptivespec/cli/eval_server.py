"""`adaptivespec eval --engine openai=URL`: the same evaluation, asked of a running server."""

from __future__ import annotations

from ..errors import UserError
from . import options as o
from .eval_run import carry_out
from .eval_setup import Wanted, check_mixes, check_tools, load_questions, prepare, prompt_texts, run_settings, session

TIMEOUT = 600.0
"""Seconds for one answer, retries included."""


def evaluate_server(engine: str, flags: o.EngineFlags, arms: str, wanted: Wanted, timeout: float) -> None:
    """Evaluate a running server.

    Args:
        engine: `openai=URL`.
        flags: of the local engine; only the model's name means something here.
        arms: the text of --arms.
        wanted: the other flags.
        timeout: seconds for one answer, retries included.

    Raises:
        UserError: before any work for what does not fit, a server that is not there or does not obey a request's settings; later for
            one that went away.
    """
    from ..evaluation.runs import Asked
    from ..evaluation.server import connect, parse_engine, require_openai, self_description
    from ..evaluation.server_answers import MAX_REQUESTS, ServerAnswerer
    from ..evaluation.server_arms import parse_server_arms

    url = parse_engine(engine)
    refuse_idle(flags, wanted)
    if wanted.batch > MAX_REQUESTS:
        raise UserError(f"--batch: at most {MAX_REQUESTS} requests at a time with --engine, not {wanted.batch}")
    chosen = parse_server_arms(arms)
    questions = load_questions(wanted.names, wanted.files, wanted.limits, wanted.skips)
    check_tools(wanted.names)
    require_openai()
    described = {arm.label: {"kinds": list(arm.kinds), "settings": list(arm.settings)} for arm in chosen}
    check_mixes(described, questions)
    server = connect(url, None if flags.model == o.EngineFlags.model else flags.model)
    settings = run_settings({"engine": "openai", "model": server.model}, described, questions, wanted)
    earlier = prepare(wanted.out, settings, wanted.fresh, wanted.yes)
    asked = {name: Asked(own, [], wanted.params[name], wanted.skips.get(name, 0)) for name, own in questions.items()}
    with ServerAnswerer(server, chosen, wanted.batch, timeout) as answerer:
        first = wanted.names[0]
        answerer.probe(questions[first][0], wanted.params[first])
        now = session(f"server at {url}", server.model, None, server.context_length, wanted.names, wanted.seed)
        carry_out(
            wanted,
            answerer,
            [arm.label for arm in chosen],
            asked,
            settings,
            earlier,
            prompt_texts(None, questions),
            {**now, "server": self_description(server), "arms": [arm.label for arm in chosen]},
        )


def refuse_idle(flags: o.EngineFlags, wanted: Wanted) -> None:
    """Raise UserError for flags of the local engine that a server never sees."""
    default = o.EngineFlags()
    for name, value in vars(flags).items():
        if name != "model" and value != getattr(default, name):
            raise UserError(f"--{name.replace('_', '-')} has no effect with --engine: the server was started with its own")
    if wanted.interleave:
        raise UserError("--interleave has no effect with --engine: it is for the time of this engine")
    if wanted.replaced:
        raise UserError("--replaced has no effect with --engine: servers don't say what a promoted token replaced")
