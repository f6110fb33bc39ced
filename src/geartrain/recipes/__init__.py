"""Tasks by name, each in a file of its own: loader, graph, rules, target."""

from geartrain.recipes.babi import BABI
from geartrain.recipes.charlm import CHARLM
from geartrain.recipes.cifar import CIFAR
from geartrain.recipes.listreduce import LISTREDUCE
from geartrain.recipes.mnist import MNIST
from geartrain.recipes.qm9 import QM9
from geartrain.recipes.recipe import Choice, Option, Recipe, Setting, Task, Value, meant
from geartrain.recipes.sentiment import SENTIMENT
from geartrain.recipes.shapes import SHAPES

RECIPES: tuple[Recipe, ...] = (
    MNIST,
    LISTREDUCE,
    SENTIMENT,
    BABI,
    QM9,
    CIFAR,
    CHARLM,
    SHAPES,
)


def find_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ValueError: There is none.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    known = [recipe.name for recipe in RECIPES]
    raise ValueError(f"no recipe '{name}': there is {', '.join(known)}{meant(name, known)}")


__all__ = ["RECIPES", "Choice", "Option", "Recipe", "Setting", "Task", "Value", "find_recipe"]
