//! Scripts, the words of their commands, and what is not known about them.

use crate::emit::shell::script::Command;
use crate::emit::shell::word::Word;
use crate::emit::shell::{Doubt, commands};

fn read(script: &str) -> Vec<Command> {
    commands(script).unwrap_or_else(|error| panic!("{script}\n{error}"))
}

/// Returns the commands with options, in which a word that is not known ends in `!` and one that may be missing in `?`.
fn shown(script: &str) -> String {
    let commands = read(script);
    let with_options = commands.iter().filter(|command| command.words.iter().any(Word::is_option));
    let shown = with_options.map(|command| {
        let word = |word: &Word| match word.doubt {
            Doubt::None => word.text.clone(),
            Doubt::Unset(_) | Doubt::Absent(_) => format!("{}?", word.text),
            Doubt::Unknown(_) => format!("{}!", word.text),
        };
        let words: Vec<String> = command.words.iter().map(word).collect();
        let maybe = command.depends_on.map_or(String::new(), |line| format!(" (line {line})"));
        words.join(" ") + &maybe
    });
    shown.collect::<Vec<_>>().join("; ")
}

fn check(script: &str, expected: &str) {
    assert_eq!(shown(script), expected, "{script}");
}

/// Returns the first reason of a doubt.
fn reason(script: &str) -> String {
    let commands = read(script);
    let mut reasons =
        commands.iter().flat_map(|command| &command.words).filter_map(|word| word.doubt.reason());
    reasons.next().unwrap_or_default().to_owned()
}

#[test]
fn variables_and_lists_are_expanded() {
    check("A=8\nrun --a $A --b ${A}x --c '$A' --d \"$A\"", "run --a 8 --b 8x --c $A --d 8");
    check("export A=${B:-4}; C=$((A * 2)) # --x\nrun --a $A --c=${C:=9}", "run --a 4 --c=8");
    check("X=(--a 1 # no\n  --b)\nX+=(--c \"2 3\")\nrun ${X[@]} \\\n  --d", "run --a 1 --b --c 2 3 --d");
    check("declare -a X=(--a)\nX+=(\"--b 2\")\nrun \"${X[@]}\"", "run --a --b 2");
    check("O=\"--a 1 \\\n --b 2\"\nsrun sh -c \"python x.py ${O}\"", "srun sh -c python x.py --a 1 --b 2");
    check("A=1\nA+=2\nrun --a $A 2>&1 > log | tee --append", "run --a 12");
    check("X=(1 2)\nrun --a ${X[1]} --b \"${X[*]}\"", "run --a 2 --b 1 2");
    check("X=()\nrun --a \"${X[@]}\" --b", "run --a --b");
    check("run --a $'1' --b \"\\$A \\x\" --c\\\n d", "run --a 1 --b $A \\x --c d");
    check("A=1 B=$A\nA=2 run --a $A --b $B", "run --a 1 --b 1");
}

#[test]
fn lines_of_options_have_no_separators() {
    check("--a Et|(t|)*2L; # x\n--b $A", "--a Et|(t|)*2L;; --b ?");
}

#[test]
fn defaults_keep_their_letters() {
    check("run --a ${L:-Et*31|tL} --b", "run --a Et*31|tL --b");
    check("run --a \"${L:-E (t|)*2; &L}\"", "run --a E (t|)*2; &L");
    check("run ${O:---a 1 --b 2} --c", "run --a 1 --b 2 --c");
    check("A=1\nrun --a ${A:+x|y} --b${B:+z} --c ${A-2} --d ${E:-${A:-3}}", "run --a x|y --b --c 1 --d 1");
    check("A=$(x)\nrun ${A:+--b 1} --a ${A:-2}", "run --b! 1! --a ?!");
    check("run --a ${L:-'t|}'} ${M:-\"}\"}", "run --a t|} }");
    check("A=1\nrun --a $(( ${A:-2} * 3 )) --b ${A:?no}", "run --a 3 --b 1");
}

#[test]
fn conditions_that_compare_are_decided() {
    let script = "T=fp8\nif [[ \"$T\" == fp8 && -z $U ]]; then A=1; elif [ $T = x ]; then A=2; else A=3; fi\nrun --a $A";
    check(script, "run --a 1");
    check("if [ 3 -gt 4 ] || false; then A=1\nelse\n  A=2\nfi\nrun --a $A", "run --a 2");
    check("A=1; [ -n \"$B\" ] && A=2\n[ -n \"$A\" ] || A=3\nrun --a $A", "run --a 1");
    check("A=test\nif [ $A = test ]; then B=1; else B=2; fi\nrun --b $B", "run --b 1");
    check("A=1\nif ! [[ $A == 2 || ( $A == 3 ) ]]; then B=1; fi\nrun --b $B", "run --b 1!");
    check("A='x y'\nif [[ $A == 'x y' ]]; then B=1; else B=2; fi\nrun --b $B", "run --b 1");
    check("if [[ $A =~ ^(x|y)$ ]]; then B=1; fi\nrun --b $B", "run --b 1!");
    assert_eq!(
        reason("for i in 1 2; do A=1; done\nrun --a $A"),
        "`A` depends on a condition or a loop of line 1, which is not run"
    );
    assert_eq!(
        reason("\nif [ -f x ]; then B=2; fi\nrun --b $B"),
        "`B` depends on a condition or a loop of line 2, which is not run"
    );
}

#[test]
fn cases_are_decided_by_their_patterns() {
    let case =
        |word: &str| format!("M={word}\ncase $M in\n  a|b) A=1;;\n  (c) A=2 ;;\n  *) A=3\nesac\nrun --a $A");
    check(&case("b"), "run --a 1");
    check(&case("c"), "run --a 2");
    check(&case("d"), "run --a 3");
    check(&case("$(x)"), "run --a 3!");
    check("case $1 in --x) A=1;; --y|--z) run --b;; esac\nrun --a $A", "run --a ?");
    check("case a in a*) A=1;; esac\nrun --a $A", "run --a 1!");
    check("case a in a) A=1;& b) A=2;; esac\nrun --a $A", "run --a 2!");
}

#[test]
fn commands_run_as_their_lists_say() {
    check("make && {\n run --a\n}", "run --a (line 1)");
    check("true && {\n run --a\n} || run --b", "run --a; run --b (line 1)");
    check("true && { [ -z $A ]; } || run --b", "");
    check("false && (\n run --a\n)\nrun --b", "run --b");
    check("[ -f x ] &&\n\n # no\n run --a", "run --a (line 1)");
    check("false ||\n run --a", "run --a");
    check("false &&\n run --a", "");
    check("false && cat x | run --a\nrun --b", "run --b");
    check("{ A=1; }\n( A=2; A+=3 )\nrun --a $A", "run --a 1");
    check("A=1\n( A+=3 )\nrun --a $A", "run --a 1");
    check("A=1\n( A=2 run --a $A; f() { run --no; } )\nf\n", "run --a 1");
    check("A=1\n( A+=2 )\n( A=3; run --b $A )\nrun --a $A", "run --b 3; run --a 1");
    let long = "x".repeat(300);
    check(&format!("A={long}\n( A+=y )\nrun --a $A"), &format!("run --a {long}y!"));
    check("A=1\n( A=2; run --a $A )\nrun --a $A", "run --a 2; run --a 1");
    check(
        "if [ -f x ]; then run --a; else run --b; fi\nrun --c",
        "run --a (line 1); run --b (line 1); run --c",
    );
    check("while true; do run --a; done", "run --a (line 1)");
    check("if false; then run --a; fi > log; run --b", "run --b");
    check("run --a &\nwait\nrun --b &> log", "run --a; run --b");
    check("exit\nrun --a", "");
    check("if [ -z $1 ]; then run --a; exit; fi\nrun --b", "run --a");
    check("if [ -f x ]; then exit; fi\nrun --b", "run --b");
}

#[test]
fn functions_count_where_they_are_called() {
    check("f() { run --no; }\nrun --a", "run --a");
    check("f() {\n  run --a $1 \"$@\"\n}\nf x --y", "run --a x x --y");
    check("function f { run --a; }\nfalse && f\n[ -f x ] && f", "run --a (line 3)");
    check("A=1\nf () { local A=2; B=3; }\nf\nrun --a $A --b $B", "run --a 1 --b 3");
    check(
        "A=1\nf() { local A=2; A=3; B=4; }\n( f; run --a $A --b $B )\nrun --a $A --b $B",
        "run --a 1 --b 4; run --a 1 --b ?",
    );
    check("f() {\n if true; then return; fi\n run --no\n}\nf; run --a", "run --a");
    check("f() { g; }\ng() { run --a; }\nf", "run --a");
    check("f() { local B=${B:=5}; B=6; }\nf\nrun --b $B", "run --b 5");
    check("f() { ( local B=2 ); B=3; }\nf\nrun --b $B", "run --b 3");
    check("f() { local A=2; local A=3; }\nA=1\nf\nrun --a $A", "run --a 1");
    check("f() ( A=2; run --a $A )\nA=1\nf; run --b $A", "run --a 2; run --b 1");
    let error = commands("f() { f; f; }\nf").expect_err("an endless call").to_string();
    assert_eq!(
        error,
        "line 1: the functions of the script call each other too often; write the command of the training alone"
    );
}

#[test]
fn variables_that_commands_set_are_not_known() {
    let set = [
        "((N+=1))",
        "((N++))",
        "let N=2",
        "let 'N = 3'",
        "read N",
        "read -r M N",
        "printf -v N 2",
        "mapfile -t N",
        "unset M; N=$M",
        "declare -l N=A",
        "declare -n N=M",
        "for N in 2 3; do :; done",
        "for ((N=0; N<2; N++)); do :; done",
        "eval N=2",
        "export N=$(x)",
        "readonly \"N=$(x)\"",
        "[ -f x ] && unset N",
        "while read -r N; do :; done < x",
    ];
    for set in set {
        let shown = shown(&format!("N=1\n{set}\nrun --n $N"));
        assert!(shown.ends_with('!') || shown.ends_with('?'), "{set}: {shown}");
    }
    check("N=1\nunset N\nrun --n $N", "run --n ?");
    for kept in
        ["((M+=1))", "((N==2))", "export N", "export M=2", "false && read N", "f() { N=2; }", "echo read N"]
    {
        check(&format!("N=1\n{kept}\nrun --n $N"), "run --n 1");
    }
    check("declare N=2\nexport \"M=3\"\nrun --n $N --m $M", "run --n 2 --m 3");
    check(": ${N:=9}\nrun --n $N", "run --n 9");
    check("N=1\nfor i in 1 2; do run --n $N; N=$((N * 2)); done", "run --n 1! (line 2)");
}

#[test]
fn parts_of_pipelines_and_background_commands_are_subshells() {
    for part in [
        "A=2 | cat",
        "cat x | A=2",
        "cat x | { A=2; B=3; }",
        "if true; then A=2; fi | tee x",
        "cat x | while read -r line; do A=2; done",
        "echo 2 | read A",
        "f | tee x",
        "A=2 &",
        "true && A=2 && A=3 &",
        "{ A=2\n}&",
        "exit | cat",
        "{ A=2; exit; } | cat",
        "g() { exit; }; g | cat",
        "exit &",
        "cat x | { unset A; }",
        "cat x |\n\n A=2",
        "f() { A=3; }; f() { A=4; } | cat; (f)",
    ] {
        check(&format!("f() {{ A=2; }}\nA=1\n{part}\nrun --a $A"), "run --a 1");
    }
    for rest in
        ["A=2; cat x | cat", "A=2 && cat x | cat", "cat x & A=2", "A=1 || B=2 & A=2", "cat | cat\nA=2"]
    {
        check(&format!("A=1\n{rest}\nrun --a $A"), "run --a 2");
    }
    check("f() { cat | { return; }; (return); run --a; return; run --b; }\nf; run --c", "run --a; run --c");
    check("A=1\n{ A=2; run --a $A; } | tee x\nrun --b $A", "run --a 2; run --b 1");
}

#[test]
fn a_loop_changes_what_its_rounds_change() {
    let check = |body: &str, expected: &str| {
        check(
            &format!("A=1; tp=2\nf() {{ A=2; }}\nset -- x y\nfor i in 1 2; do\nrun --a $A\n{body}\ndone"),
            expected,
        );
    };
    for changes in [
        "A=2",
        "A+=2",
        "f",
        "read A",
        "read -r A B",
        "((A++))",
        "let A=2",
        "printf -v A x",
        "unset A",
        "A[0]=2",
        "for A in 1; do :; done",
        ": $((A += 1))",
        "eval A=2",
        "if [ $tp = 3 ]; then A=2; fi; tp=3",
        "declare A=2",
        "mapfile A",
        "export A=$(x)",
        "g() { f; }; g",
        "f | cat; f",
    ] {
        check(changes, "run --a 1! (line 4)");
    }
    for keeps in [
        "run --A=3",
        "echo A=2",
        "[ $A == 2 ]",
        "# A=2",
        "echo done A=2",
        "h() { A=2; }",
        "A=2 x",
        "cat <<X\nA=2\nX",
    ] {
        let expected = if keeps.starts_with("run") {
            "run --a 1 (line 4); run --A=3 (line 4)"
        } else {
            "run --a 1 (line 4)"
        };
        check(keeps, expected);
    }
    check("run --b $1; shift", "run --a 1 (line 4); run --b x! (line 4)");
    check("run --b $1; set -- z", "run --a 1 (line 4); run --b x! (line 4)");
    check("run --b $1; f x", "run --a 1! (line 4); run --b x (line 4)");
}

#[test]
fn unset_words_of_tests_are_left_out() {
    for (test, holds) in [
        ("[ -z $U ]", true),
        ("[ -n $U ]", true),
        ("[ -n \"$U\" ]", false),
        ("[ $U ]", false),
        ("[ $U = a ]", false),
        ("! [ $U = a ]", true),
        ("[ $U != a ]", false),
        ("[ \"$U\" != a ]", true),
        ("[ $U\"\" != a ]", true),
        ("[ $U'' = '' ]", true),
        ("[ $U -gt 3 ]", false),
        ("[ ! $U ]", true),
        ("test -n $U", true),
        ("[[ -n $U ]]", false),
        ("[[ $U != a ]]", true),
        ("[[ -z ${U[@]} ]]", true),
        ("[ -z \"${U[@]}\" ]", true),
        ("[ -n \"${U[*]}\" ]", false),
    ] {
        check(
            &format!("if {test}; then A=1; else A=2; fi\nrun --a $A"),
            if holds { "run --a 1" } else { "run --a 2" },
        );
    }
}

#[test]
fn arguments_are_shifted_and_set() {
    let rest = "run --a $1 --n $# \"$@\"";
    check(&format!("set -- x 'y z' --c\n{rest}"), "run --a x --n 3 x y z --c");
    check(&format!("set -- x y\nshift\n{rest}"), "run --a y --n 1 y");
    check(&format!("set -- x y z\nshift 2; shift 2\n{rest}"), "run --a z --n 1 z");
    check(&format!("set -eo pipefail +x y z\n{rest}"), "run --a y --n 2 y z");
    check(&format!("set -- x\nset -e\n{rest}"), "run --a x --n 1 x");
    check(&format!("set -- x\nset --\n{rest}"), "run --a --n 0");
    check(&format!("set -- x\n( set -- y ); cat | set -- y\n{rest}"), "run --a x --n 1 x");
    check(
        &format!("f() {{ shift; {rest}; set -- b; }}\nset -- x\nf y z\n{rest}"),
        "run --a z --n 1 z; run --a x --n 1 x",
    );
    check(&format!("set -- x y\n[ -f x ] && shift\n{rest}"), "run --a x! --n ?! x! y!");
    check(&format!("set -- x y\nshift $n\n{rest}"), "run --a x! --n ?! x! y!");
    check("set -- $(x) y\nrun --a $1 --b $2 --n $#", "run --a ?! --b ?! --n ?!");
    check("f() { run --a $1; }\nf $U y", "run --a y");
    check("shift\nrun --a $1", "run --a ?");
}

#[test]
fn elements_of_lists_are_set() {
    check("A=(1 2)\nA[1]=3; A[2]=4; A[-1]+=5\nrun --a ${A[@]}", "run --a 1 3 45");
    check("A=(1 2); i=1\nA[$i]=3; A[i - 1]=4\nrun --a ${A[@]}", "run --a 4 3");
    check("A[0]=--a\nA[1]='2 3'\nrun \"${A[@]}\"", "run --a 2 3");
    check("A=1\nA[1]=2\nrun --a ${A[@]}", "run --a 1 2");
    check("A=(1)\nA[4]=2\nrun --a ${A[0]}", "run --a 1!");
    check("A=(1)\nA[x]=2\nrun --a ${A[0]}", "run --a 1!");
    check("A=(1)\n[ -f x ] && A[0]=2\nrun --a ${A[0]}", "run --a 1!");
    check("A=(1)\n( A[0]=2 )\nrun --a ${A[0]}", "run --a 1");
    check("A=([1]=2 [0]=1)\nrun --a ${A[0]} --b ${A[1]}", "run --a ?! --b ?!");
    check("A=($(x) 2)\nrun --a ${A[1]}", "run --a ?!");
    check("A=(1 2)\nfor x in 1; do A[0]=3; done\nrun --a ${A[1]}", "run --a 2!");
    for set in ["((A[0]=2))", "let A[0]=2", "read A[0]", "printf -v A[0] 2"] {
        check(&format!("A=(1)\n{set}\nrun --a ${{A[0]}}"), "run --a 1!");
    }
    check("declare -A A\nA[0]=2\nrun --a ${A[0]}", "run --a 2!");
    check("x[1-3] --b; file[1] --a", "x[1-3] --b; file[1] --a");
}

#[test]
fn sums_have_the_bases_of_the_shell() {
    check(
        "A=010\nrun --a $((A + 1)) --b $((010)) --c $((0x1f)) --d $((-010))",
        "run --a 9 --b 8 --c 31 --d -8",
    );
    check("run --a $((08)) --b $((0)) --c $((00))", "run --a ?! --b 0 --c 0");
    check(
        "if [[ 010 -eq 8 ]]; then A=1; fi; if [ 010 -eq 10 ]; then B=1; fi\nrun --a $A --b $B",
        "run --a 1 --b 1",
    );
    check("declare -i N=010 M\nM=2*3; N+=1\nrun --n $N --m $M", "run --n 9 --m 6");
    check("declare -i N=1\nN=x\nrun --n $N", "run --n x!");
    check("declare -i N=1\nunset N; N=1+1\nrun --n $N", "run --n 1+1");
    check("f() { local -i N=1+1; run --n $N; }\nf; N=1+1\nrun --n $N", "run --n 2; run --n 1+1");
    check("[ -f x ] && declare -i N\nN=1+1\nrun --n $N", "run --n 1+1!");
}

#[test]
fn only_the_doubtful_part_of_a_value_is_not_known() {
    check("X=(--a 1)\n[ -f x ] && X+=(--b 2)\nX+=(--c)\nrun ${X[@]}", "run --a 1 --b! 2! --c");
    check("O='--a 1'\nif x; then O+=' --b'; fi\nO+=' --c'\nrun $O", "run --a 1 --b! --c");
    check(
        "O='--a 1'\nif x; then O=\"$O --b 2\"; fi\nO=\"$O --c\"\nO=\"${O} --d\"\nrun $O",
        "run --a 1 --b! 2! --c --d",
    );
    check("O='--a 1'\nif x; then O='--b 2'; fi\nrun $O", "run --a! 1! --b! 2!");
    check("X=(--a)\nif x; then X=(--b); fi\nrun ${X[@]}", "run --a! --b!");
    check("A=1\nif x; then A=12; fi\nrun --a $A", "run --a 12!");
    check("A=1\nif x; then A+=' 2'; fi\nB=${C:-$A}\nrun --a \"$B\"", "run --a 1 2!");
    check("A=1\nif x; then A=\"$A 2\"; fi\nif [ \"$A\" = 1 ]; then B=1; fi\nrun --b $B", "run --b 1!");
    check(
        "X=(1 2)\nA=${X[@]}\nB=\"${X[@]} 3\"\nrun --a \"$A\" --b \"$B\" --c $X",
        "run --a 1 2 --b 1 2 3 --c 1",
    );
}

#[test]
fn printed_text_is_no_command() {
    for printed in [
        "echo run --no",
        "printf '%s' --no",
        "cat <<EOF\nrun --no\nEOF",
        "cat <<-EOF\n\trun --no\n\tEOF",
        "[ $1 = --no ]",
    ] {
        check(&format!("{printed}\nrun --a"), "run --a");
    }
    check("cat <<EOF\n  EOF\n--no\nEOF\nrun --a", "run --a");
    check("X=(--a)\necho --no \"${X[@]}\"", "--a");
}

#[test]
fn blanks_of_values_separate_words() {
    check("A='1 '\nrun --a ${A}2", "run --a 1 2");
    check("A=' 1'\nrun --a=${A}2", "run --a= 12");
    check("A=' '\nrun --a=1${A}2", "run --a=1 2");
    check("A='1 2'\nrun --a=${A}3 --b=\"${A}3\"", "run --a=1 23 --b=1 23");
}

#[test]
fn arguments_of_the_script_are_no_words() {
    check("run --a 1 \"$@\" $* ${X[@]}", "run --a 1 ? ? ?");
    assert_eq!(reason("run --a 1 \"$@\""), "`$@` of line 1 has the arguments of the script");
}

#[test]
fn values_that_need_a_command_are_not_known() {
    assert_eq!(reason("A=$(nproc)\nrun --a $A"), "`$(nproc)` of line 1 is not run");
    assert_eq!(reason("run --a \"$1\""), "`$1` of line 1 is an argument of the script");
    assert_eq!(reason("run --a $A"), "`A` of line 1 has no value in the file");
    assert_eq!(reason("run --a $((N * 2))"), "`$((N * 2))` of line 1 has a value that is not known");
    assert_eq!(reason("A=x\nrun --a ${A%.*}"), "`${A%.*}` of line 2 is not read");
    assert_eq!(reason("run --a <(x)"), "`<(x)` of line 1 is not run");
}

#[test]
fn hostile_scripts_end() {
    let doubled = format!("A=xxxxxxxx\n{}run --a $A", "A=$A$A\n".repeat(60));
    assert!(reason(&doubled).contains("too long"));
    for text in [
        "'", "\"", "$", "${", "$(", "`", "A=(", "<<", "\\", "if", "fi", "))", "${}", "case", "[[", "((",
        "f()", "}", ";;", "for", "${A[", "${#",
    ] {
        let _ = (
            commands(text),
            commands(&format!("run --a {text}")),
            commands(&format!("A=8\n{text} --a\n{text}")),
        );
    }
}

/// Each text would take minutes if a letter were read as often as there are letters.
#[test]
fn long_scripts_are_read_once() {
    const BYTES: usize = 1 << 17;
    let long = "x".repeat(BYTES / 2);
    let mut scripts: Vec<String> = [
        "${A:-",
        "$((",
        "a&",
        "(a)",
        "((",
        "if ",
        "if a; then b; ",
        "A=1\n",
        "A+=x\n",
        "A+=(x)\n",
        "for i in 1; do echo do; done\n",
        "while ",
        "while x; do A+=(y); done\n",
        "if x; then A=(y); fi\n",
        "if x; then A+=\" y\"; fi\n",
        "if x; then A=\"$A y\"; fi\n",
        "{ ",
        "f() { ",
        "case x in y) ",
        "<<A ",
        "$A ",
        "\"$A\" ",
        "--a ",
        "--a 1\n",
        "[[ ",
        "`",
        "\\",
        "!",
        "a|",
        "((A=1))\n",
        "O=--a\nif x; then O=b; fi\n",
        "A[",
        "A[0]=1\n",
        "A=1|",
        "A=1&",
        "while x; do f; done\n",
        "f() { for i in 1; do A=1; done; }; f\n",
        "set -- $@ x; shift\n",
        "declare -i A+=1\n",
    ]
    .iter()
    .map(|part| part.repeat(BYTES / part.len()))
    .collect();
    scripts.push(format!("O='--a'\n{}", "if x; then O=b; fi\n".repeat((1 << 20) / 20)));
    scripts.push(format!("O='--a {long}'\n{}", "if x; then O=b; fi\n".repeat(BYTES / 40)));
    scripts.push(format!("A=({long})\n{}", "( A+=(x) )\n".repeat(BYTES / 30)));
    scripts.push(format!("((a{}))", "[a".repeat(BYTES / 2 - 8)));
    let names: String = (0..BYTES / 16).map(|index| format!("A{index}=--x{index}\n")).collect();
    scripts.push(names);
    scripts.push(format!("A={long}\n{}", "$A ".repeat(BYTES / 6)));
    scripts.push(format!("A='{}'\nrun $A", "--a ".repeat(BYTES / 8)));
    scripts.push(format!("{long}=1\nwhile x; do {long}+=({}); done", "y ".repeat(BYTES / 8)));
    scripts.push(format!("f() {{ A=1; }}\n{}", "f\n".repeat(BYTES / 2)));
    for script in scripts {
        let start = std::time::Instant::now();
        let _ = commands(&script);
        let shown: String = script.chars().take(20).collect();
        assert!(start.elapsed().as_secs() < 20, "{shown}: {:?}", start.elapsed());
    }
}
