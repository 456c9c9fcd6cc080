"""A model's answer is data: whatever it says, no grader may run it, and no trick earns a reward that the problem does not
give."""

from __future__ import annotations

import pytest

from paceline.tasks import make_task

EVALUATING = ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration",
              "binary_matrix", "n_queens", "spiral_matrix", "string_insertion"]


def payloads(path):
    """Expressions that create the file `path` where anything evaluates them as Python or by sympy's parser."""
    quoted, double = f"'{path}'", f'"{path}"'
    run = f"'_'+'_import_'+'_(\"os\").system(\"touch {path}\")'"
    codes = ",".join(str(ord(char)) for char in f"__import__('os').system('touch {path}')")
    return [
        f"S({run})", f"sympify({run})", f"parse_expr({run})", f"Ｓ({run})", f"ｓｙｍｐｉｆｙ({run})", f"1+S({run})*0",
        f"(lambda: S({run}))()", f"[S({run}) for i in [1]][0]", f"(S)({run})", f"S\\\n({run})",
        f"S('''{run[1:]}''')", f"Integer(S({run}))",
        f"S(str().join(map(chr,({codes}))))", f"Symbol('x', S({run}))", f"lambdify((), 'x', modules=[S({run})])",
        f"factorial(S({run}))", f"len(S({run}))", f"S({run})!", f"S({run}).args", f"sqrt(S({run}))", f"sin(S({run}))+x",
        f"eval({run})", f"ｅｖａｌ({run})", f"exec({run})", f"__import__('os').system('touch {path}')", f"open({quoted}, 'w')",
        f"open({double}, 'w').write('x')", f"(open)({quoted},'w')", f"().__class__.__mro__[1].__subclasses__()[S({run})]",
        f"(1).__class__.__base__.__subclasses__()[0].__init__.__globals__['sys'].modules['os'].mkdir({quoted})",
        f"re.enum.sys.modules['os'].mkdir({quoted})", f"sys.modules['os'].mkdir({quoted})", f"os.mkdir({quoted})",
        f"[re.enum.sys.modules['os'].mkdir({quoted})]", f"[[re.enum.sys.modules['os'].mkdir({quoted})]]",
        f"evaluate({run})", f"numexpr.evaluate({run})", f"np.load({quoted})", f"f'{{S({run})}}'", f"x if S({run}) else y",
        f"1 if [S({run})] else 1", f"preview('x', viewer='file', filename={quoted}, output='dvi')",
        f"list_of_lists[S({run})]", f"{{S({run})}}", f"plot(x, show=S({run}))", f"srepr(S({run}))", f"x:=S({run})",
        f"1\\\n+S({run})", f"1;S({run})", f"1\nS({run})", f"\tS({run})", f"#\nS({run})", f"S(b{run[:3]}+S({run}))",
    ]


@pytest.mark.parametrize("generator", EVALUATING)
def test_no_answer_runs_as_code(generator, tmp_path):
    task = make_task(f"reasoning-gym:{generator}", size=3, seed=1)
    tmp_path.chmod(0o777)
    for number, payload in enumerate(payloads(tmp_path / "marker")):
        assert task.grade(task[0], f"<answer>{payload}</answer>") <= 0.05
        assert not (tmp_path / "marker").exists(), f"payload {number}: {payload}"
