"""`python -m ft_core.control`: the controller's process, started by `ftrun`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from ft_core.control.lead import candidate
from ft_core.control.shell import LAST_LINES, Shell
from ft_core.errors import FAILED, ConfigError
from ft_core.process import collector, handed, last_line, parent
from ft_core.process.async_writer import console, log_to_console, say
from ft_core.process.descriptors import check_limit
from ft_core.process.lines import LOG_CONTEXT
from ft_core.settings import known

log = logging.getLogger("ft_core.control")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ft_core.control", description=__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--failed-before", type=int, help="given to a controller that takes another's place")
    parser.add_argument("--spare", action="store_true", help="given on nodes that no job begins with")
    parent.add_argument(parser)
    last_line.add_argument(parser)
    handed.add_argument(parser)
    args = parser.parse_args()
    parent.expect(args.parent)
    last_line.share(args.last_line)
    LOG_CONTEXT.component = "controller"
    log_to_console()
    console().keep(args.job_dir / "logs" / "controller.log")
    collector.exempt()
    try:
        settings, secret = known(args.job_dir, handed.take(args.handed))
        LOG_CONTEXT.json = settings.log_format == "json"
        check_limit("the controller", *settings.size)
        if settings.leadership:
            return asyncio.run(candidate.serve(settings, secret, args.job_dir, not args.spare))
        code = asyncio.run(Shell(settings, secret, args.job_dir, args.failed_before).run())
        assert code is not None, "a controller without a lease cannot lose it"
        return code
    except ConfigError as error:
        say(f"ftrun: {error}", "ERROR")
        return 1
    except Exception:
        log.critical("this controller fails", exc_info=True)
        return FAILED
    finally:
        console().flush(LAST_LINES)


if __name__ == "__main__":
    sys.exit(main())
