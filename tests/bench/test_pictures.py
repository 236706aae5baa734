from itertools import pairwise

from matplotlib import pyplot as plt

from bench import pictures


def test_the_picture_of_speed_names_its_edges_where_none_covers_another():
    found = {
        "spindle": {1: [1.5, 1.4], 16: [0.93]},
        "fixed-head-2": {1: [1.3], 16: [0.92]},
        "fixed-suffix-4": {1: [1.2], 16: [0.94]},
        "fixed-head-4": {1: [1.1], 16: [0.925]},
    }
    figure = pictures.speed(found, pictures.THEMES["light"])
    axis = figure.axes[0]
    low, high = axis.get_ylim()
    heights = {text.get_text(): text.get_position()[1] for text in axis.texts}
    plt.close(figure)
    names = ["worst fixed: head, 2 tokens", "Spindle", "best fixed: suffix, 4 tokens"]
    assert all(
        heights[above] - heights[below] > 0.06 * (high - low) for below, above in pairwise(names)
    )
    assert high > 1.5


def test_in_the_picture_of_the_simulation_a_saturated_load_is_open():
    row = {"policy": "spindle", "measured_s": 1.0, "predicted_s": 1.1, "below_saturation": True}
    full = {**row, "policy": "none", "measured_s": 8.0, "below_saturation": False}
    figure = pictures.simulation([row, full], pictures.THEMES["dark"])
    faces = {
        (line.get_xdata()[0], line.get_ydata()[0]): line.get_markerfacecolor()
        for line in figure.axes[0].lines
        if len(line.get_xdata()) == 1
    }
    plt.close(figure)
    assert faces == {(1.0, 1.1): pictures.THEMES["dark"]["line"], (8.0, 1.1): "none"}
