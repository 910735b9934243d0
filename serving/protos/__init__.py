"""Messages and stubs; `python -m serving.protos` makes the `_pb2` files anew after a change."""
