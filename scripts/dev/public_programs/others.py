"""Reinforcement learning, audio, learning to learn."""

import tensorflow as tf

from public_programs._program import IMPORT, MICRO, K, Program, accumulated, fed, integers, namespace, normal, stand_in

PPO = (
    r"(?ms)^        # 3\. Calculate the gradients.*?^        grads_and_var = list\(zip\(grads, var\)\)\n",
    "        # 3. Calculate the gradients\n"
    "        def clip(grads_and_vars):\n"
    "            grads, variables = zip(*grads_and_vars)\n"
    "            return list(zip(tf.clip_by_global_norm(grads, max_grad_norm)[0], variables))\n\n"
    "        self.trainer = accum.compat.v1.AccumOptimizer(self.trainer, 4, transform=clip)\n"
    "        grads_and_var = self.trainer.compute_gradients(loss, params)\n"
    "        grads, var = zip(*grads_and_var)\n",
    1,
)


def ppo2():
    classes = {name: type(name, (), {}) for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")}
    stand_in("gym", spaces=namespace(**classes))
    stand_in("gym.spaces", **classes)
    from baselines.common.policies import build_policy
    from baselines.ppo2.model import Model
    from gym import spaces

    observed, action = spaces.Box(), spaces.Discrete()
    observed.dtype, observed.shape, action.n = "float32", (6,), 3
    policy = build_policy(namespace(observation_space=observed, action_space=action), "mlp", num_hidden=8)
    sizes = {"nbatch_act": None, "nbatch_train": None, "nsteps": 1, "ob_space": observed, "ac_space": action}

    def build(accum_steps, seen, actions, advantages, returns, logs, values):
        batch = (seen, seen, actions, advantages, returns, logs, values, tf.constant(1e-2), tf.constant(0.2))
        with tf.Session(), fed(*batch):
            model = Model(policy=policy, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, **sizes)
        return model._train_op, model.stats_list[0] + 0.5 * model.stats_list[1] - 0.01 * model.stats_list[2]

    return (normal(6), integers(3), normal(), normal(), 1 + 0.1 * normal(), normal()), build


def wavenet():
    stand_in("librosa")
    from wavenet import WaveNetModel, optimizer_factory

    def build(accum_steps, audio):
        model = WaveNetModel(tf.shape(audio)[0], [1, 2, 4, 1, 2, 4], 2, 8, 8, 8, 16, use_biases=True)
        loss = model.loss(audio)
        optimizer = accumulated(optimizer_factory["adam"](1e-2, 0.9), accum_steps)
        return optimizer.minimize(loss, var_list=tf.trainable_variables()), loss

    return (0.3 * normal(40, 1),), build


def maml():
    import main
    from maml import MAML

    def build(accum_steps, inputs, labels, others, targets):
        tasks = K * MICRO // accum_steps
        main.FLAGS(["main", "--norm=None", f"--meta_batch_size={tasks}", "--meta_lr=0.01", "--update_lr=0.01"])
        model = MAML(test_num_updates=2)
        model.construct_model({"inputa": inputs, "labela": labels, "inputb": others, "labelb": targets})
        return model.metatrain_op, model.total_losses2[0] * tasks / tf.to_float(tf.shape(inputs)[0])

    return (normal(5, 1), normal(5, 1), normal(5, 1), normal(5, 1)), build


PROGRAMS = {
    "ppo2": Program(
        "openai/baselines",
        "`ppo2.model.Model` with `common.policies`",
        {"baselines/ppo2/model.py": [IMPORT, PPO]},
        ppo2,
        note="gym is not installed; empty classes stand in for its spaces, and nothing is played",
    ),
    "wavenet": Program(
        "ibab/tensorflow-wavenet",
        "`WaveNetModel.loss`, `optimizer_factory`",
        {},
        wavenet,
        added=1,
        note="`train.py` is one function around files of audio, so its `minimize` is called from here. librosa, which "
        "reads them, is not installed; an empty module stands in for it",
    ),
    "maml": Program(
        "cbfinn/maml",
        "`MAML.construct_model`, with second derivatives over a batch of tasks",
        {
            "maml.py": [
                (r"^import tensorflow as tf", "import accum.compat.v1\nimport tensorflow as tf", 1),
                (
                    r"optimizer = tf\.train\.AdamOptimizer\(self\.meta_lr\)",
                    "optimizer = accum.compat.v1.AccumOptimizer(tf.train.AdamOptimizer(self.meta_lr), 4)",
                    1,
                ),
            ]
        },
        maml,
    ),
}
