//! The assignment of tests to processes, the order of these, and the tests that have the machine
//! for themselves.

use super::{
    cost::{Known, test_name},
    program::Program,
};

/// The suites, or single tests, that measure loss, or time against a bound: a machine that is busy
/// with other tests looks to them like a network that loses packets.
const ALONE: [&str; 5] = [
    "lab::remains::a_lab_comes_up_fast_and_goes_completely",
    "loss",
    "observe::outside::an_outside_bench_sees_the_same_ratio",
    "sockets::cost::of_connect",
    "speed",
];
/// Tests of these suites that measure neither: they wait most of their time, and run beside others.
const NOT_ALONE: [&str; 4] = [
    "loss::direct::a_node_says_why_it_opens_nothing",
    "loss::writes::a_restart_writes_nothing_tc",
    "loss::writes::a_restart_writes_nothing_xdp",
    "loss::writes::one_service_changes_and_only_that_one_is_written",
];
/// The suites of which one process loads or computes something for all of its tests. Each is
/// divided among few processes, as unit tests are, most of which take less time than a process.
const TOGETHER: [&str; 2] = ["budgets", "packets"];
/// The assumed time of a test that no earlier run has timed.
const SECONDS: f64 = 10.0;
/// The same for a test that shares its process with others.
const SECONDS_TOGETHER: f64 = 0.5;
/// The number of tests that are worth a process of their own.
const SHARE: usize = 40;

/// One process with tests of one program.
#[derive(Clone, Debug)]
pub(super) struct Job<'a> {
    pub(super) program: &'a Program,
    pub(super) tests: Vec<String>,
    /// Whether nothing else runs at the same time.
    pub(super) alone: bool,
    seconds: f64,
}

impl<'a> Job<'a> {
    pub(super) fn new(program: &'a Program, alone: bool) -> Self {
        Self { program, tests: Vec::new(), alone, seconds: 0.0 }
    }
}

/// Returns the jobs of these tests: first those that run alone, then the others, the longest first,
/// so that none begins late and keeps one processor busy at the end.
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
        let mut own: Vec<Job<'a>> = (0..processes).map(|_| Job::new(program, false)).collect();
        for (seconds, test) in timed {
            // The processes of a suite take about as long as each other. None is left without a
            // test, because a test program that is given no name runs all that it has.
            let less = |a: &&mut Job<'_>, b: &&mut Job<'_>| {
                a.seconds.total_cmp(&b.seconds).then(a.tests.len().cmp(&b.tests.len()))
            };
            let Some(job) = own.iter_mut().min_by(less) else { break };
            job.seconds += seconds;
            job.alone |= runs_alone(suite, &test_name(suite, test));
            job.tests.push(test.clone());
        }
        jobs.extend(own);
    }
    jobs.sort_by(|a, b| b.alone.cmp(&a.alone).then(b.seconds.total_cmp(&a.seconds)));
    jobs
}

fn runs_alone(suite: &str, name: &str) -> bool {
    (ALONE.contains(&suite) || ALONE.contains(&name)) && !NOT_ALONE.contains(&name)
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
            // No earlier run has timed it.
            ("policy", "t2", false),
            ("policy", "t0", false),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn processes_of_a_suite_take_about_as_long_as_each_other() {
        let known = Known::of(&[("packets::t7", 20.0), ("packets::t8", 10.0)]);
        let jobs = planned(&[("packets", 45)], &known);
        // 43 tests of half a second, and two of known times.
        let numbers: Vec<usize> = jobs.iter().map(|(_, tests, _)| tests.len()).collect();
        assert_eq!(numbers.iter().sum::<usize>(), 45);
        let with = |test: &str| jobs.iter().position(|(_, tests, _)| tests.iter().any(|name| name == test));
        assert_ne!(with("t7"), with("t8"));
        assert!(jobs[with("t7").unwrap()].1.len() < jobs[with("t8").unwrap()].1.len(), "{numbers:?}");
    }

    #[test]
    fn a_test_of_a_suite_that_runs_alone_need_not() {
        let suite = |name| runs_alone("loss", name);
        assert_eq!([suite("loss::restart::tc_ipv4"), suite(NOT_ALONE[0])], [true, false]);
        assert!(!runs_alone("policy", "policy::t0"));
    }

    /// A test that was renamed would run beside others, or alone.
    #[test]
    fn tests_that_run_alone_or_not_exist() {
        for name in ALONE.into_iter().chain(NOT_ALONE) {
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
        // The file of times has two decimals: shorter times are read as zero.
        let known = Known::of(&[("policy::t1", 0.0), ("policy::t2", 0.0), ("policy::t3", 0.0)]);
        let jobs = planned(&[("packets", 200), ("budgets", 5), ("policy", 4)], &known);
        assert!(jobs.iter().all(|(_, tests, _)| !tests.is_empty()), "{jobs:?}");
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
