//! Rules of nf_tables that drop what conntrack calls INVALID, as nft and iptables write them. Those
//! that name states in a set are not read.

use std::io;

use super::{
    super::netlink::{attributes, find, text},
    Family, HEADER, NFTABLES, dump,
};

// linux/netfilter/nf_tables.h
const GETRULE: u16 = 7;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const CT_KEY: u16 = 2;
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

/// Returns the chains with such a rule, each with its table.
pub fn invalid_drops() -> io::Result<Vec<String>> {
    let rules = dump(NFTABLES | GETRULE)?;
    let mut chains: Vec<_> = rules.iter().filter_map(|message| chain(message)).collect();
    chains.dedup();
    Ok(chains)
}

/// Returns the chain of a rule that drops what is INVALID.
fn chain(message: &[u8]) -> Option<String> {
    let (family, attributes) = (Family::from_number(*message.first()?)?, message.get(HEADER..)?);
    if !drops_invalid(find(attributes, RULE_EXPRESSIONS)?) {
        return None;
    }
    let [table, chain] = [RULE_TABLE, RULE_CHAIN].map(|kind| find(attributes, kind).map(text));
    Some(format!("chain {} of table {family} {}", chain?, table?))
}

fn drops_invalid(list: &[u8]) -> bool {
    let (mut of_state, mut invalid) = (false, false);
    for expression in attributes(list) {
        let bytes = expression.into_inner();
        let body = bytes.get(4..usize::from(expression.length())).unwrap_or_default();
        let Some(name) = find(body, EXPRESSION_NAME).map(text) else { continue };
        let data = find(body, EXPRESSION_DATA).unwrap_or_default();
        match name.as_str() {
            "ct" => of_state = find(data, CT_KEY).and_then(number) == Some(STATE),
            // The state is a number of this machine's byte order.
            "bitwise" if of_state => {
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
            "reject" if invalid => return true,
            "immediate" if invalid => {
                let verdict = find(data, IMMEDIATE_DATA).and_then(|data| find(data, DATA_VERDICT));
                let code = verdict.and_then(|verdict| find(verdict, VERDICT_CODE)).and_then(number);
                if code == Some(NF_DROP) {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
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
        [expression("ct", &attribute(CT_KEY, &STATE.to_be_bytes())), expression("bitwise", &mask)].concat()
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
            assert_eq!(drops_invalid(&rule), found, "{what}");
        }
    }
}
