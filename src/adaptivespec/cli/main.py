"""The `adaptivespec` command: registers the commands and turns every expected failure into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import sys
import warnings

import typer

from ..config import SpeculativeConfig
from ..errors import UserError
from . import bench, calibrate, chat, check, demo, generate, models, report, serve, simulate
from .eval import evaluate
from .groups import flattened
from .render import aside

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Faster answers from large language models by adaptive speculative decoding, without training.",
)
app.command("generate")(flattened(generate.generate))
app.command("chat")(flattened(chat.chat))
app.command("bench")(flattened(bench.bench))
app.command("calibrate")(flattened(calibrate.calibrate))
app.command("eval")(flattened(evaluate))
app.command("report")(report.report)
app.command("simulate")(simulate.simulate)
app.command("models")(models.models)
app.command("demo")(demo.demo)
app.command("serve", context_settings={"allow_extra_args": True})(serve.serve)
app.command("check")(check.check)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


def fail(message: str, code: int) -> int:
    """One line on standard error."""
    aside(f"error: {message}", "red")
    return code


def no_such_option(name: str, options: list[str]) -> str:
    """The flag that was probably meant: one that ends alike, a setting without a flag of its own, or the nearest name."""
    setting = name.lstrip("-").replace("-", "_")
    if alike := [option for option in options if option.endswith(f"-{name.lstrip('-')}")]:
        return f"no such option {name}; did you mean {alike[0]}?"
    if setting in SpeculativeConfig.model_fields:
        return f"no such option {name}; set {setting} with --speculative-config (generate, chat) or in an arm (bench)"
    close = difflib.get_close_matches(name, options, n=1)
    return f"no such option {name}" + (f"; did you mean {close[0]}?" if close else "; see --help")


def run(arguments: list[str]) -> int:
    """The exit code of a command line: 0 done, 1 something failed, 2 bad input, 130 interrupted. A warning is one line too."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: aside(f"warning: {message}", "yellow")
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="adaptivespec", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return fail(str(error), 2)
    except (KeyboardInterrupt, EOFError):
        return fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output left, as `| head` does; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:  # rich's and click's own way out of a broken pipe
        return error.code if isinstance(error.code, int) else 1
    except MemoryError:
        return fail("out of memory: try a smaller model or --context-length", 1)
    except OSError as error:
        return fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors; typer may bring its own copy of click
            message = error.format_message()
            if type(error).__name__ == "NoSuchOption":
                context = getattr(error, "ctx", None)
                options = [option for parameter in context.command.params for option in parameter.opts] if context else []
                message = no_such_option(str(getattr(error, "option_name", "")), options)
            if not message.strip():  # no arguments at all: the help was printed
                return 2
            return fail(message, int(getattr(error, "exit_code", 2)))
        if type(error).__name__ == "Abort":
            return fail("interrupted", 130)
        if type(error).__name__ == "Exit":
            return int(getattr(error, "exit_code", 0))
        raise


def main() -> None:
    """Entry point of the script."""
    sys.exit(run(sys.argv[1:]))
