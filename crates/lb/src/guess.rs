//! A guess of the balancer in front of a Service, from its objects.

use traffic_policy_cluster::model::object::{Service, ServiceType, Signs};

use super::{
    balancer::Balancer,
    profiles::{AWS_ALB, AWS_NLB, AZURE, CLOUD_PROVIDER_KIND, CUSTOM, GKE, METALLB_BGP, METALLB_L2},
};

/// A balancer, and the evidence for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guess {
    pub balancer: &'static Balancer,
    pub why: String,
}

/// Guesses the balancer. `provider` is the prefix of the Nodes' `providerID`.
#[must_use]
pub fn guess(service: &Service, provider: Option<&str>) -> Guess {
    let nothing = Signs::default();
    let signs = service.signs.as_deref().unwrap_or(&nothing);
    by_signs(signs)
        .or_else(|| {
            let provider = provider.filter(|_| service.service_type == ServiceType::LoadBalancer)?;
            let balancer = match provider {
                "gce" => &GKE,
                "aws" => &AWS_NLB,
                "azure" => &AZURE,
                "kind" => &CLOUD_PROVIDER_KIND,
                _ => return None,
            };
            Some(Guess { balancer, why: format!("the Nodes' providerID begins with {provider}://") })
        })
        .unwrap_or_else(|| Guess {
            balancer: &CUSTOM,
            why: "nothing in the objects names one: say --balancer, or what it asks by flags".to_owned(),
        })
}

fn by_signs(signs: &Signs) -> Option<Guess> {
    let found = |balancer, why: String| Some(Guess { balancer, why });
    if let Some(class) = signs.class.as_deref() {
        let why = format!("loadBalancerClass {class}");
        match class {
            "service.k8s.aws/nlb" | "eks.amazonaws.com/nlb" => return found(&AWS_NLB, why),
            _ if class.starts_with("networking.gke.io/") => return found(&GKE, why),
            _ if class.contains("metallb") => return found(&METALLB_L2, why),
            _ => {}
        }
    }
    for (name, value) in &signs.annotations {
        let why = format!("annotation {name}");
        match name.as_str() {
            "metallb.universe.tf/ip-allocated-from-pool" | "metallb.io/ip-allocated-from-pool" => {
                return found(&METALLB_L2, format!("{why}; --balancer metallb-bgp if it announces by BGP"));
            }
            _ if name.starts_with("metallb.") && value.contains("bgp") => return found(&METALLB_BGP, why),
            _ if name.starts_with("alb.ingress.kubernetes.io/") => return found(&AWS_ALB, why),
            _ if name.starts_with("service.beta.kubernetes.io/aws-") => return found(&AWS_NLB, why),
            _ if name.starts_with("service.beta.kubernetes.io/azure-") => return found(&AZURE, why),
            _ if name.starts_with("networking.gke.io/") || name.starts_with("cloud.google.com/") => {
                return found(&GKE, why);
            }
            _ => {}
        }
    }
    let hostname = signs.hostnames.iter().find(|name| name.ends_with(".amazonaws.com"))?;
    found(&AWS_NLB, format!("its hostname {hostname}"))
}
