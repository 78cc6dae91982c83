"""Per-example statistics without per-example gradients: a `vmap` whose products of two values may stay factored."""

from microbatch.jax._factored._evaluate import evaluate as evaluate
from microbatch.jax._factored._explain import Explanation as Explanation
from microbatch.jax._factored._explain import explain as explain
