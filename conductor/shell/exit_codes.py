"""What the `podium` process ends with, for service managers; docs/command-line.md lists them."""

from protocol.errors import EXIT_CONFIG

OK = 0
GAVE_UP = 1  # a child kept ending, or never started
USAGE = 2  # the command line
UNAVAILABLE = 69  # `podium stats`: no daemon answers
BUG = 70  # the scheduler failed again and again
BUSY = 75  # another daemon owns the runtime directory
CONFIG = EXIT_CONFIG  # 78: a restart cannot help
SIGNALLED = 128  # + the number of the signal that cut a drain short

HELP = f"""\
Exit status: {OK} success; {GAVE_UP} a child process kept failing; {USAGE} wrong usage; \
{UNAVAILABLE} no daemon answers; {BUG} internal error; {BUSY} another daemon owns the runtime \
directory; {CONFIG} configuration error (a restart cannot help); {SIGNALLED}+N a second signal N \
cut the shutdown short."""
