"""What two processes must agree on: messages, codec, graph, configuration, errors, channels.

Imports no sibling package and no torch, so that every process, the client too, may load it.
"""

__version__ = "0.1.0"
PROTOCOL_VERSION = 1
