"""`ops/compose-check`: runs docker-compose.yml with Docker, and checks what it promises."""
