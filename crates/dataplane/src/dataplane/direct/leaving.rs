//! Endpoints that have left their Service, or whose Service is gone: packets of connections that
//! are still open are opened for some time more. A pod serves them to their end, and nodes in front
//! may hear of its leave later than this one.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use traffic_policy_ebpf::abi::NO_SERVICE;

use super::{Element, Place, Target};
use crate::dataplane::sync::former::LASTS;

/// The elements of endpoints that have left, each with the time at which it did.
#[derive(Debug, Default)]
pub(super) struct Leaving(BTreeMap<Place, (Target, Instant)>);

impl Leaving {
    /// Notes elements that a Service port wanted until now. Some may be wanted again, or by another
    /// one.
    pub(super) fn note(&mut self, elements: impl IntoIterator<Item = Element>, now: Instant) {
        self.0.extend(elements.into_iter().map(|(key, target)| (key, (target, now))));
    }

    /// Notes the elements in the map of an earlier agent: addresses, and those of these Service
    /// ports.
    pub(super) fn found(&mut self, held: &BTreeMap<Place, Target>, indices: &BTreeSet<u32>, now: Instant) {
        let stays = |index: u32| index == NO_SERVICE || indices.contains(&index);
        for (key, target) in held.iter().filter(|((_, index), _)| stays(*index)) {
            self.0.entry(*key).or_insert((*target, now));
        }
    }

    /// Forgets the elements of a Service port that exists no longer, and returns them: its index
    /// will be another one's. Its open connections need the addresses alone.
    pub(super) fn forget(&mut self, elements: &[Element]) -> Vec<Place> {
        let indices: BTreeSet<u32> = elements.iter().map(|((_, index), _)| *index).collect();
        self.remove(|(_, index), _| *index != NO_SERVICE && indices.contains(index))
    }

    /// Forgets what has left long ago, and returns it.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Place> {
        self.remove(|_, left| now.duration_since(left) >= LASTS)
    }

    fn remove(&mut self, is_over: impl Fn(&Place, Instant) -> bool) -> Vec<Place> {
        let over = self.0.iter().filter(|(key, (_, left))| is_over(key, *left));
        let over: Vec<Place> = over.map(|(key, _)| *key).collect();
        for key in &over {
            self.0.remove(key);
        }
        over
    }

    /// Adds those of `doubtful` that nobody wants, if there is room; otherwise they are forgotten.
    pub(super) fn add_to(
        &mut self,
        wanted: &mut BTreeMap<Place, Target>,
        doubtful: &BTreeSet<Place>,
        has_room: bool,
    ) {
        for key in doubtful {
            if wanted.contains_key(key) || !has_room {
                self.0.remove(key);
            } else if let Some((target, _)) = self.0.get(key) {
                wanted.insert(*key, *target);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{IpAddr, Ipv4Addr},
        time::Duration,
    };

    use super::*;

    const POD: Place = (IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 7);
    const ADDRESS: Place = (IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), NO_SERVICE);

    const fn at(port: u16) -> Target {
        Target { port, netns: 0 }
    }

    fn kept(leaving: &mut Leaving, wanted: &[Element], has_room: bool) -> BTreeMap<Place, Target> {
        let mut wanted = wanted.iter().copied().collect();
        leaving.add_to(&mut wanted, &[POD, ADDRESS].into(), has_room);
        wanted
    }

    #[test]
    fn who_has_left_is_kept_for_some_time() {
        let (mut leaving, start) = (Leaving::default(), Instant::now());
        leaving.note([(POD, at(80)), (ADDRESS, at(0))], start);
        assert_eq!(kept(&mut leaving, &[], true), [(POD, at(80)), (ADDRESS, at(0))].into());
        assert_eq!(leaving.expire(start + LASTS - Duration::from_secs(1)), []);
        assert_eq!(leaving.expire(start + LASTS), [POD, ADDRESS]);
        assert_eq!(kept(&mut leaving, &[], true), [].into());
    }

    #[test]
    fn who_comes_back_leaves_anew() {
        let (mut leaving, start) = (Leaving::default(), Instant::now());
        leaving.note([(POD, at(80))], start);
        assert_eq!(kept(&mut leaving, &[(POD, at(81))], true), [(POD, at(81))].into());
        assert_eq!(kept(&mut leaving, &[], true), [].into(), "it was wanted, and has not left since");
    }

    #[test]
    fn others_come_first_in_a_full_map() {
        let mut leaving = Leaving::default();
        leaving.note([(POD, at(80))], Instant::now());
        assert_eq!(kept(&mut leaving, &[], false), [].into());
    }

    #[test]
    fn of_a_service_that_is_gone_addresses_alone_stay() {
        let mut leaving = Leaving::default();
        leaving.note([(POD, at(80)), (ADDRESS, at(0))], Instant::now());
        assert_eq!(leaving.forget(&[((IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9)), 7), at(80))]), [POD]);
        assert_eq!(kept(&mut leaving, &[], true), [(ADDRESS, at(0))].into());
    }

    #[test]
    fn an_agent_keeps_those_of_an_earlier_one() {
        let mut leaving = Leaving::default();
        let of_a_former_one = (IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 8);
        let held = [(POD, at(80)), (ADDRESS, at(0)), (of_a_former_one, at(80))].into();
        leaving.found(&held, &[7].into(), Instant::now());
        assert_eq!(kept(&mut leaving, &[], true), [(POD, at(80)), (ADDRESS, at(0))].into());
        assert!(!leaving.0.contains_key(&of_a_former_one));
    }
}
