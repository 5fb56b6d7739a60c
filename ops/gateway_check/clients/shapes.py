"""Shapes for the clients that take them from pydantic."""

# mypy: ignore-errors

from typing import Literal

from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    colour: Literal["red", "green", "blue"]
