#!/bin/sh
# Plays a test program in tests of the queue: each test that is named does as its name says.
while [ "${1#--}" != "$1" ]; do shift; done
echo "running $# tests"
passed=0
for test; do
    case $test in
    dies) kill -KILL $$ ;;
    fails)
        echo "test $test ... FAILED"
        echo "what it printed"
        echo "test result: FAILED. $passed passed; 1 failed; 0 ignored; 0 measured; 0 filtered out"
        exit 101
        ;;
    skips) echo "SKIPPED $test: no means" >&2 ;;
    sleeps*)
        echo "begin" >>log
        sleep 0.3
        echo "end" >>log
        ;;
    is_missing) continue ;;
    esac
    echo "test $test ... ok"
    passed=$((passed + 1))
done
echo "test result: ok. $passed passed; 0 failed; 0 ignored; 0 measured; 0 filtered out"
