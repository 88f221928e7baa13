"""Trains as PureJaxRL does: environments, rollouts and updates of PPO are one jitted scan, which saves nothing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

UPDATES, ENVIRONMENTS, LENGTH, EPOCHS = 12, 8, 16, 2


class Moment(NamedTuple):
    seen: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array


class Running(NamedTuple):
    train: TrainState
    places: jax.Array
    key: jax.Array
    number: jax.Array


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, seen):
        hidden = nn.tanh(nn.Dense(32)(seen))
        return nn.Dense(3)(hidden), nn.Dense(1)(hidden)[..., 0]


def step_of_environment(place, action):
    after = jnp.clip(place + 0.2 * (action[:, None] - 1), -2, 2)
    return after, -jnp.abs(after[:, 0])


def advantages(moments, last_value):
    def back(carry, moment):
        gain, following = carry
        delta = moment.reward + 0.99 * following - moment.value
        gain = delta + 0.99 * 0.95 * gain
        return (gain, moment.value), gain

    _, gains = jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), moments, reverse=True)
    return gains


def loss_of(params, apply, moments, gains):
    logits, value = apply(params, moments.seen)
    log_prob = jnp.take_along_axis(nn.log_softmax(logits), moments.action[..., None], -1)[..., 0]
    ratio = jnp.exp(log_prob - moments.log_prob)
    scaled = (gains - gains.mean()) / (gains.std() + 1e-8)
    actor = -jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled).mean()
    return actor + 0.5 * jnp.square(value - gains - moments.value).mean()


def update(running, _):
    train = running.train

    def act(carry, key):
        logits, value = train.apply_fn(train.params, carry)
        action = jax.random.categorical(key, logits)
        log_prob = jnp.take_along_axis(nn.log_softmax(logits), action[:, None], -1)[:, 0]
        after, reward = step_of_environment(carry, action)
        return after, Moment(carry, action, log_prob, value, reward)

    key, *keys = jax.random.split(running.key, LENGTH + 1)
    places, moments = jax.lax.scan(act, running.places, jnp.stack(keys))
    gains = advantages(moments, train.apply_fn(train.params, places)[1])

    def epoch(train, _):
        loss, grads = jax.value_and_grad(loss_of)(train.params, train.apply_fn, moments, gains)
        return train.apply_gradients(grads=grads), loss

    train, losses = jax.lax.scan(epoch, train, length=EPOCHS)
    jax.debug.callback(say, running.number, losses[-1], ordered=True)
    return Running(train, places, key, running.number + 1), moments.reward.mean()


def say(number, loss):
    print("step", int(number), float(loss))


network = ActorCritic()
one, two, three = jax.random.split(jax.random.key(0), 3)
places = jax.random.uniform(one, (ENVIRONMENTS, 1), minval=-1)
train = TrainState.create(
    apply_fn=network.apply, params=network.init(two, places), tx=optax.adam(1e-2, eps=1e-5)
)
running = Running(train, places, three, jnp.int32(0))


@jax.jit
def train_all(running):
    return jax.lax.scan(update, running, length=UPDATES)


running, rewards = train_all(running)
