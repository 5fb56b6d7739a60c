"""`ops/gateway-check`: schemathesis against a gateway."""
