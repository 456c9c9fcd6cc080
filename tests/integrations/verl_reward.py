"""A reward function for verl: the share of the digit 2."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return solution_str.count("2") / max(1, len(solution_str))
