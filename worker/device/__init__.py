"""Devices: streams, events and copies behind one small interface."""
