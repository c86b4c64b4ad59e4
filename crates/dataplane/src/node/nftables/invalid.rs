//! Rules of nf_tables that drop what conntrack calls INVALID, as nft and iptables write them, also
//! by sets of states and by maps of states to verdicts. What a chain does to which a rule jumps is
//! judged by itself.

use std::io;

use super::{
    super::netlink::{attribute, attributes, find, text},
    Family, HEADER, NFTABLES, dump, dump_of,
};

// linux/netfilter/nf_tables.h
const GETRULE: u16 = 7;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const CT_REGISTER: u16 = 1;
const CT_KEY: u16 = 2;
const LOOKUP_SET: u16 = 1;
const LOOKUP_SOURCE: u16 = 2;
const LOOKUP_VERDICT: u16 = 3;
const LOOKUP_FLAGS: u16 = 5;
/// NFT_LOOKUP_F_INV.
const INVERTED: u32 = 1;
const GETSETELEM: u16 = 13;
const ELEMENTS_TABLE: u16 = 1;
const ELEMENTS_SET: u16 = 2;
const ELEMENTS: u16 = 3;
const ELEMENT_KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const ELEMENT_FLAGS: u16 = 3;
/// NFT_SET_ELEM_CATCHALL.
const CATCHALL: u32 = 2;
const BITWISE_MASK: u16 = 4;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const IMMEDIATE_DATA: u16 = 2;
const MATCH_NAME: u16 = 1;
const MATCH_INFO: u16 = 3;
/// NFT_CT_STATE.
const STATE: u32 = 0;
const NF_DROP: u32 = 0;
/// NF_CT_STATE_INVALID_BIT and XT_CONNTRACK_STATE_INVALID, which are the same.
const INVALID: u8 = 1;
/// The places of `match_flags`, `invert_flags` and `state_mask` in `struct xt_conntrack_mtinfo2`
/// and later ones, and the flag of a state: linux/netfilter/xt_conntrack.h.
const XT_FLAGS: [usize; 3] = [146, 148, 150];
const XT_STATE: u8 = 1;

/// An element of a set or map by states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Element {
    /// The state, the first part of a key of several; `None`: all that have no other element.
    state: Option<u32>,
    /// The code of the verdict, in a map to verdicts.
    verdict: Option<u32>,
}

/// Returns the chains with such a rule, each with its table.
pub fn invalid_drops() -> io::Result<Vec<String>> {
    let mut chains = Vec::new();
    for message in dump(NFTABLES | GETRULE)? {
        chains.extend(chain(&message)?);
    }
    chains.dedup();
    Ok(chains)
}

/// Returns the chain of a rule that drops what is INVALID.
fn chain(message: &[u8]) -> io::Result<Option<String>> {
    let Some(number) = message.first() else { return Ok(None) };
    let attributes = message.get(HEADER..).unwrap_or_default();
    let [table, chain] = [RULE_TABLE, RULE_CHAIN].map(|kind| find(attributes, kind));
    let (Some(family), Some(table), Some(chain), Some(list)) =
        (Family::from_number(*number), table, chain, find(attributes, RULE_EXPRESSIONS))
    else {
        return Ok(None);
    };
    let drops = drops_invalid(list, |set| elements(*number, table, set))?;
    Ok(drops.then(|| format!("chain {} of table {family} {}", text(chain), text(table))))
}

/// Reads the elements of a set. `table`, `set`: the values of their attributes.
fn elements(family: u8, table: &[u8], set: &[u8]) -> io::Result<Vec<Element>> {
    let mut request = vec![0; HEADER];
    request[0] = family;
    request.extend(attribute(ELEMENTS_TABLE, table));
    request.extend(attribute(ELEMENTS_SET, set));
    let messages = match dump_of(NFTABLES | GETSETELEM, &request) {
        // It has gone with its rule.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Vec::new(),
        dumped => dumped?,
    };
    let lists = messages.iter().filter_map(|message| find(message.get(HEADER..)?, ELEMENTS));
    let elements = lists.flat_map(|list| attributes(list).map(|one| element(body(one.into_inner()))));
    Ok(elements.flatten().collect())
}

/// Returns the value of an attribute with its header.
fn body(attribute: &[u8]) -> &[u8] {
    let length = attribute.first_chunk().map_or(0, |bytes| usize::from(u16::from_ne_bytes(*bytes)));
    attribute.get(4..length).unwrap_or_default()
}

fn element(attributes: &[u8]) -> Option<Element> {
    let flags = find(attributes, ELEMENT_FLAGS).and_then(number).unwrap_or(0);
    let key = find(attributes, ELEMENT_KEY).and_then(|key| find(key, DATA_VALUE));
    // The state is a number of this machine's byte order.
    let state = key.and_then(|key| key.first_chunk()).map(|bytes| u32::from_ne_bytes(*bytes));
    if state.is_none() && flags & CATCHALL == 0 {
        return None;
    }
    let verdict = find(attributes, ELEMENT_DATA).and_then(|data| find(data, DATA_VERDICT));
    Some(Element { state, verdict: verdict.and_then(|verdict| find(verdict, VERDICT_CODE)).and_then(number) })
}

/// Whether a rule drops what is INVALID. `elements`: those of a set that the rule looks up.
fn drops_invalid(list: &[u8], elements: impl Fn(&[u8]) -> io::Result<Vec<Element>>) -> io::Result<bool> {
    let (mut of_state, mut invalid) = (None, false);
    for expression in attributes(list) {
        let body = body(expression.into_inner());
        let Some(name) = find(body, EXPRESSION_NAME).map(text) else { continue };
        let data = find(body, EXPRESSION_DATA).unwrap_or_default();
        match name.as_str() {
            "ct" if find(data, CT_KEY).and_then(number) == Some(STATE) => {
                of_state = find(data, CT_REGISTER).and_then(number);
            }
            // The register has something else now. Where these name theirs, `ct` names its own.
            "ct" | "exthdr" | "fib" | "meta" | "payload" | "rt"
                if find(data, CT_REGISTER).and_then(number) == of_state =>
            {
                of_state = None;
            }
            "lookup" if of_state.is_some() && find(data, LOOKUP_SOURCE).and_then(number) == of_state => {
                let found = elements(find(data, LOOKUP_SET).unwrap_or_default())?;
                let of_it = found.iter().find(|element| element.state == Some(u32::from(INVALID)));
                let of_it = of_it.or_else(|| found.iter().find(|element| element.state.is_none()));
                let inverted = find(data, LOOKUP_FLAGS).and_then(number).unwrap_or(0) & INVERTED != 0;
                if find(data, LOOKUP_VERDICT).is_some() {
                    if of_it.is_some_and(|element| element.verdict == Some(NF_DROP)) {
                        return Ok(true);
                    }
                } else {
                    invalid |= of_it.is_some() != inverted;
                }
            }
            // The state is a number of this machine's byte order.
            "bitwise" if of_state.is_some() => {
                let mask = find(data, BITWISE_MASK).and_then(|mask| find(mask, DATA_VALUE));
                invalid |= mask
                    .and_then(|mask| mask.first_chunk())
                    .is_some_and(|mask| u32::from_ne_bytes(*mask) & u32::from(INVALID) != 0);
            }
            "match" if find(data, MATCH_NAME).map(text).as_deref() == Some("conntrack") => {
                let info = find(data, MATCH_INFO).unwrap_or_default();
                // Both bytes of each field are read: the flag is in the low one.
                let [flags, inverted, states] = XT_FLAGS.map(|at| {
                    let field = info.get(at..at + 2).and_then(|field| field.first_chunk());
                    field.map_or(0, |field| u16::from_ne_bytes(*field) as u8)
                });
                invalid |= flags & !inverted & XT_STATE != 0 && states & INVALID != 0;
            }
            "reject" if invalid => return Ok(true),
            "immediate" if invalid => {
                let verdict = find(data, IMMEDIATE_DATA).and_then(|data| find(data, DATA_VERDICT));
                let code = verdict.and_then(|verdict| find(verdict, VERDICT_CODE)).and_then(number);
                if code == Some(NF_DROP) {
                    return Ok(true);
                }
            }
            _ => {}
        }
    }
    Ok(false)
}

fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::netlink::attribute;

    const ELEMENT: u16 = 1;

    fn expression(name: &str, data: &[u8]) -> Vec<u8> {
        let name = attribute(EXPRESSION_NAME, &[name.as_bytes(), &[0]].concat());
        attribute(ELEMENT, &[name, attribute(EXPRESSION_DATA, data)].concat())
    }

    fn verdict(code: u32) -> Vec<u8> {
        let verdict = attribute(DATA_VERDICT, &attribute(VERDICT_CODE, &code.to_be_bytes()));
        expression("immediate", &attribute(IMMEDIATE_DATA, &verdict))
    }

    fn state(mask: u32) -> Vec<u8> {
        let mask = attribute(BITWISE_MASK, &attribute(DATA_VALUE, &mask.to_ne_bytes()));
        [of_state(), expression("bitwise", &mask)].concat()
    }

    fn of_state() -> Vec<u8> {
        let register = attribute(CT_REGISTER, &1u32.to_be_bytes());
        expression("ct", &[register, attribute(CT_KEY, &STATE.to_be_bytes())].concat())
    }

    fn lookup(source: u32, more: &[Vec<u8>]) -> Vec<u8> {
        let set = attribute(LOOKUP_SET, b"set\0");
        let source = attribute(LOOKUP_SOURCE, &source.to_be_bytes());
        expression("lookup", &[set, source, more.concat()].concat())
    }

    fn by_iptables(states: u16) -> Vec<u8> {
        let mut info = [0; 160];
        info[XT_FLAGS[0]..][..2].copy_from_slice(&u16::from(XT_STATE).to_ne_bytes());
        info[XT_FLAGS[2]..][..2].copy_from_slice(&states.to_ne_bytes());
        let name = attribute(MATCH_NAME, b"conntrack\0");
        expression("match", &[name, attribute(MATCH_INFO, &info)].concat())
    }

    #[test]
    fn a_drop_of_what_is_invalid_is_found() {
        const ACCEPT: u32 = 1;
        for (what, rule, found) in [
            ("nft", [state(1), verdict(NF_DROP)].concat(), true),
            ("nft, with others", [state(1 | 2), verdict(NF_DROP)].concat(), true),
            ("iptables", [by_iptables(1), verdict(NF_DROP)].concat(), true),
            ("rejected", [state(1), expression("reject", &[])].concat(), true),
            ("accepted", [state(1), verdict(ACCEPT)].concat(), false),
            ("another state", [state(8), verdict(NF_DROP)].concat(), false),
            ("another state by iptables", [by_iptables(8), verdict(NF_DROP)].concat(), false),
            ("every packet", verdict(NF_DROP), false),
        ] {
            assert_eq!(drops_invalid(&rule, |_| Ok(Vec::new())).unwrap(), found, "{what}");
        }
    }

    #[test]
    fn a_drop_by_a_set_or_map_is_found() {
        const ACCEPT: u32 = 1;
        let set = |states: &[Option<u32>]| {
            states.iter().map(|state| Element { state: *state, verdict: None }).collect::<Vec<_>>()
        };
        let map = |elements: &[(Option<u32>, u32)]| {
            let elements = elements.iter().map(|(state, verdict)| (*state, Some(*verdict)));
            elements.map(|(state, verdict)| Element { state, verdict }).collect::<Vec<_>>()
        };
        let verdicts = [attribute(LOOKUP_VERDICT, &0u32.to_be_bytes())];
        let by_map = |source| [of_state(), lookup(source, &verdicts)].concat();
        let by_set = |code| [of_state(), lookup(1, &[]), verdict(code)].concat();
        let not_in_set = || {
            let inverted = attribute(LOOKUP_FLAGS, &INVERTED.to_be_bytes());
            [of_state(), lookup(1, &[inverted]), verdict(NF_DROP)].concat()
        };
        for (what, rule, elements, found) in [
            ("a map", by_map(1), map(&[(Some(2), ACCEPT), (Some(1), NF_DROP)]), true),
            ("a map that accepts it", by_map(1), map(&[(Some(1), ACCEPT), (None, NF_DROP)]), false),
            ("a map's other verdict", by_map(1), map(&[(Some(8), NF_DROP)]), false),
            ("a map's rest", by_map(1), map(&[(Some(2), ACCEPT), (None, NF_DROP)]), true),
            ("a map by something else", by_map(2), map(&[(Some(1), NF_DROP)]), false),
            ("a set", by_set(NF_DROP), set(&[Some(1), Some(64)]), true),
            ("a set that is accepted", by_set(ACCEPT), set(&[Some(1)]), false),
            ("a set without it", by_set(NF_DROP), set(&[Some(8)]), false),
            ("all but a set", not_in_set(), set(&[Some(2), Some(4)]), true),
            ("all but a set with it", not_in_set(), set(&[Some(1)]), false),
        ] {
            let of_set = |name: &[u8]| {
                assert_eq!(name, b"set\0");
                Ok(elements.clone())
            };
            assert_eq!(drops_invalid(&rule, of_set).unwrap(), found, "{what}");
        }
    }
}
