//! Tables of tests.

/// Makes a test of each row: its name, and what it calls.
///
/// ```
/// # fn echoed(_attach: &str, _wire_offloads: bool) {}
/// traffic_policy_testing::rows! {
///     fn by_tc() = echoed("tc", false);
///     fn by_xdp() = echoed("xdp", false);
/// }
/// ```
#[macro_export]
macro_rules! rows {
    ($($(#[$attribute:meta])* fn $name:ident() = $call:expr;)+) => {
        $($(#[$attribute])*
        #[test]
        fn $name() {
            $call;
        })+
    };
}
