"""Channels: how frames move. One protocol, a ZeroMQ form and an in-memory twin."""
