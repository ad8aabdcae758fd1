"""The Python client, and the stream owner that gateway and client share."""
