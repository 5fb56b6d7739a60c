"""`ops/gateway-check`: unmodified clients and schemathesis against a gateway."""
