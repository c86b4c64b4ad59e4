//! What of the tests runs in which process, which come first, and which have the machine for themselves.

use super::{
    cost::{Known, test_name},
    program::Program,
};

/// Measure loss, or time against a bound: a machine that is busy with other tests looks like a network that loses packets.
/// Suites, or tests.
const ALONE: [&str; 5] = [
    "lab::remains::a_lab_comes_up_fast_and_goes_completely",
    "loss",
    "observe::outside::an_outside_bench_sees_the_same_ratio",
    "sockets::cost::of_connect",
    "speed",
];
/// One process loads or computes something for all of its tests. Each is cut into few processes, as unit tests are, of which
/// most take less time than a process.
const TOGETHER: [&str; 2] = ["budgets", "packets"];
/// Where it is not known from an earlier run.
const SECONDS: f64 = 10.0;
/// Of a test that shares its process.
const SECONDS_TOGETHER: f64 = 0.5;
/// Tests of a process that are worth a second process.
const SHARE: usize = 40;

/// One process with tests of one program.
#[derive(Clone, Debug)]
pub(super) struct Job<'a> {
    pub(super) program: &'a Program,
    pub(super) tests: Vec<String>,
    /// Nothing else runs meanwhile.
    pub(super) alone: bool,
    seconds: f64,
}

impl<'a> Job<'a> {
    pub(super) fn new(program: &'a Program, alone: bool) -> Self {
        Self { program, tests: Vec::new(), alone, seconds: 0.0 }
    }
}

/// The jobs of these tests: first those that run alone, then the others, the longest first, so that none begins late and
/// keeps one processor busy at the end.
pub(super) fn jobs<'a>(tests: &'a [(Program, Vec<String>)], known: &Known) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for (program, tests) in tests {
        let suite = program.suite.as_str();
        let together = program.unit || TOGETHER.contains(&suite);
        let otherwise = if together { SECONDS_TOGETHER } else { SECONDS };
        let processes = if together { tests.len().div_ceil(SHARE) } else { tests.len() };
        let mut timed: Vec<(f64, &String)> = tests
            .iter()
            .map(|test| (known.seconds(&test_name(suite, test)).unwrap_or(otherwise), test))
            .collect();
        timed.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut own: Vec<Job<'a>> =
            (0..processes).map(|_| Job::new(program, ALONE.contains(&suite))).collect();
        for (seconds, test) in timed {
            // The processes of a suite take about as long as each other.
            let Some(job) = own.iter_mut().min_by(|a, b| a.seconds.total_cmp(&b.seconds)) else { break };
            job.seconds += seconds;
            job.alone |= ALONE.contains(&test_name(suite, test).as_str());
            job.tests.push(test.clone());
        }
        jobs.extend(own);
    }
    jobs.sort_by(|a, b| b.alone.cmp(&a.alone).then(b.seconds.total_cmp(&a.seconds)));
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(tests: &[(&str, usize)], known: &Known) -> Vec<(String, Vec<String>, bool)> {
        let of = |number: usize| (0..number).map(|number| format!("t{number}")).collect();
        let tests: Vec<_> =
            tests.iter().map(|(suite, number)| (Program::named(suite), of(*number))).collect();
        let jobs = jobs(&tests, known);
        jobs.into_iter().map(|job| (job.program.suite.clone(), job.tests, job.alone)).collect()
    }

    #[test]
    fn the_longest_first_and_before_them_what_runs_alone() {
        let known =
            Known::of(&[("policy::t0", 3.0), ("policy::t1", 50.0), ("loss::t0", 1.0), ("speed::t0", 2.0)]);
        let jobs = planned(&[("loss", 1), ("policy", 3), ("speed", 1)], &known);
        let names: Vec<_> =
            jobs.iter().map(|(suite, tests, alone)| (suite.as_str(), &*tests[0], *alone)).collect();
        let expected = [
            ("speed", "t0", true),
            ("loss", "t0", true),
            ("policy", "t1", false),
            // Not known.
            ("policy", "t2", false),
            ("policy", "t0", false),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn processes_of_a_suite_take_about_as_long_as_each_other() {
        let known = Known::of(&[("packets::t7", 20.0), ("packets::t8", 10.0)]);
        let jobs = planned(&[("packets", 45)], &known);
        // 43 tests of half a second, and two that are known.
        let numbers: Vec<usize> = jobs.iter().map(|(_, tests, _)| tests.len()).collect();
        assert_eq!(numbers.iter().sum::<usize>(), 45);
        let with = |test: &str| jobs.iter().position(|(_, tests, _)| tests.iter().any(|name| name == test));
        assert_ne!(with("t7"), with("t8"));
        assert!(jobs[with("t7").unwrap()].1.len() < jobs[with("t8").unwrap()].1.len(), "{numbers:?}");
    }

    /// One that has another name now would run beside others.
    #[test]
    fn what_runs_alone_exists() {
        for name in ALONE {
            let path = crate::cargo::root().join("tests/tests").join(name.split("::").next().unwrap());
            let words: Vec<&str> = name.split("::").collect();
            let exists = match words[..] {
                [suite, file, test] => {
                    let source = std::fs::read_to_string(path.join(format!("{file}.rs"))).unwrap();
                    assert!(!TOGETHER.contains(&suite));
                    source.contains(&format!("fn {test}()"))
                }
                _ => path.is_dir() || path.with_extension("rs").exists(),
            };
            assert!(exists, "{name}");
        }
    }

    #[test]
    fn each_test_is_in_one_process() {
        let jobs = planned(&[("packets", 200), ("budgets", 5), ("policy", 4)], &Known::default());
        for (suite, number, processes) in [("packets", 200, 5), ("budgets", 5, 1), ("policy", 4, 4)] {
            let of = jobs.iter().filter(|(name, ..)| name == suite);
            assert_eq!(of.clone().count(), processes, "{suite}");
            let mut tests: Vec<_> = of.flat_map(|(_, tests, _)| tests).collect();
            tests.sort();
            tests.dedup();
            assert_eq!(tests.len(), number, "{suite}");
        }
    }
}
